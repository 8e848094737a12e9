// The one file that knows instruction sets: number formats, and vectors of W floats.
// GCC/clang vector extensions do the arithmetic (a * b + c becomes an FMA by itself), so only the fp16 conversions need
// intrinsics; everything else is the same source on AVX-512, AVX2, NEON and machines with none of them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define ISA "AVX-512"
constexpr int NATIVE = 16, SUMS = 16;  // floats in a vector; how many running sums fit in the registers beside the rest
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ISA "AVX2"
constexpr int NATIVE = 8, SUMS = 8;
#elif defined(__aarch64__)
#define ISA "NEON"
constexpr int NATIVE = 4, SUMS = 16;
#else
#define ISA "generic"
constexpr int NATIVE = 4, SUMS = 8;
#endif
constexpr int W = HEAD_DIM % NATIVE == 0 ? NATIVE : HEAD_DIM % (NATIVE / 2) == 0 ? NATIVE / 2 : NATIVE / 4;
static_assert(HEAD_DIM % W == 0 && HEAD_DIM % 4 == 0, "head_dim must be a multiple of 8");

// ---- Number formats, one at a time ----
struct half { uint16_t bits; };
struct bf16 { uint16_t bits; };
template <class To, class From> static inline To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
static inline float to_float(float x) { return x; }
static inline float to_float(int8_t x) { return x; }
static inline float to_float(bf16 x) { return bit_cast<float>((uint32_t)x.bits << 16); }
static inline float to_float(half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  return bit_cast<__fp16>(x.bits);
#else
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00) return bit_cast<float>(sign | 0x7f800000u | rest << 13);  // infinity, NaN
  return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(rest << 13) * 0x1p112f));
#endif
}
static inline void from_float(float x, float* p) { *p = x; }
static inline void from_float(float x, bf16* p) {  // to the nearest, ties to even
  const uint32_t u = bit_cast<uint32_t>(x);
  p->bits = x != x ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static inline void from_float(float x, half* p) {
#if defined(__F16C__)
  p->bits = _cvtss_sh(x, 0);
#elif defined(__aarch64__)
  p->bits = bit_cast<uint16_t>((__fp16)x);
#else
  const uint32_t u = bit_cast<uint32_t>(x), sign = u >> 16 & 0x8000u, rest = u & 0x7fffffffu;
  uint32_t h;
  if (rest >= 0x47800000u) h = rest > 0x7f800000u ? 0x7e00 : 0x7c00;  // NaN; beyond 65,504 becomes infinity
  else if (rest < 0x38800000u) h = bit_cast<uint32_t>(bit_cast<float>(rest) + 0.5f) - 0x3f000000u;  // subnormal
  else h = (rest + 0xc8000fffu + (rest >> 13 & 1)) >> 13;
  p->bits = sign | h;
#endif
}

// ---- Vectors of W floats ----
typedef float vf __attribute__((vector_size(W * sizeof(float))));
typedef int32_t vi __attribute__((vector_size(W * sizeof(int32_t))));
typedef uint32_t vu __attribute__((vector_size(W * sizeof(uint32_t))));
typedef uint16_t vu16 __attribute__((vector_size(W * sizeof(uint16_t))));
typedef int8_t vi8 __attribute__((vector_size(W)));

static inline vf load(const float* p) { vf v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
static inline vf load(const bf16* p) {
  vu16 v;
  memcpy(&v, p, sizeof v);
  return (vf)(__builtin_convertvector(v, vu) << 16);
}
static inline vf load(const int8_t* p) {
  vi8 v;
  memcpy(&v, p, sizeof v);
  return __builtin_convertvector(__builtin_convertvector(v, vi), vf);
}
static inline vf load(const half* p) {
  vf v;
#if defined(__AVX512F__)
  if (W == 16) {  // a constant: sizes that differ are never copied
    const __m512 x = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
    memcpy(&v, &x, W == 16 ? sizeof v : 0);
    return v;
  }
#endif
#if defined(__F16C__)
  const __m256 x = _mm256_cvtph_ps(W == 8 ? _mm_loadu_si128((const __m128i*)p) : _mm_loadl_epi64((const __m128i*)p));
  memcpy(&v, &x, W <= 8 ? sizeof v : 0);
#elif defined(__aarch64__)
  const float32x4_t x = vcvt_f32_f16(vld1_f16((const __fp16*)p));
  memcpy(&v, &x, sizeof v);
#else
  for (int i = 0; i < W; i++) v[i] = to_float(p[i]);
#endif
  return v;
}

// Lane i of the result: a[A(i)], or b[A(i) - W] from W on.
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
template <int H, size_t... I> static inline vf fold(vf a, vf b, std::index_sequence<I...>) {  // a's halves, b's halves
  return SHUFFLE(a, b, (int)(I & H ? W + I - H : I)...) + SHUFFLE(a, b, (int)(I & H ? W + I : I + H)...);
}
// The sums of W vectors, in one vector: lane i is the sum of v[i]. 3 (W - 1) instructions instead of about 7 W.
template <int H = W / 2> static inline vf sums(vf* v) {
#pragma GCC unroll 16
  for (int i = 0; i < H; i++) v[i] = fold<H>(v[i], v[i + H], std::make_index_sequence<W>());
  if constexpr (H > 1) return sums<H / 2>(v);
  return v[0];
}
static inline float sum(vf v) { float s = 0; for (int i = 0; i < W; i++) s += v[i]; return s; }
static inline vf max(vf a, vf b) { return a > b ? a : b; }  // a NaN in a is dropped here, but not by exp2
static inline float max(vf v) { float m = v[0]; for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m; return m; }

// 2^x for x <= 0, to 2e-7; below 2^-126 (minus infinity too) it gives 2^-126, a NaN stays one.
static inline vf exp2(vf x) {
  const vf low = vf{} - 126.f, magic = vf{} + 12582912.f;  // adding 1.5 * 2^23 rounds to an integer, left in the low bits
  x = x < low ? low : x;
  const vf n = x + magic, f = x - (n - magic);  // f in [-1/2, 1/2]
  vf p = f * 1.5403530e-4f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.f;
  return p * (vf)(((vu)n - 0x4b400000u + 127u) << 23);
}
