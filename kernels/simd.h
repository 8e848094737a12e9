// The one file that knows instruction sets: number formats, and vectors of W floats.
// GCC/clang vector extensions do the arithmetic (a * b + c becomes an FMA by itself), so only conversions and one test need
// intrinsics; everything else is the same source on AVX-512, AVX2, NEON and machines with none of them.
// Not used, because it gained nothing: AVX-512 BF16's dot product (the kernel waits for memory, and bf16 widens with one
// shift). AVX-512 FP16 would add up in half precision.
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

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
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
constexpr int W = HEAD_DIM % NATIVE == 0 ? NATIVE : NATIVE / 2;
static_assert(HEAD_DIM % W == 0, "head_dim must be a multiple of 8");

// ---- Number formats, one at a time ----
struct half { uint16_t bits; };
struct bf16 { uint16_t bits; };
template <class To, class From> static inline To bit_cast(const From& x) {  // the first sizeof(To) bytes; the rest are zero
  To y{};
  memcpy(&y, &x, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
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

static inline vf load(const float* p) { vf v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
static inline vf load(const bf16* p) {
  vu16 v;
  memcpy(&v, p, sizeof v);
  return (vf)(__builtin_convertvector(v, vu) << 16);
}
static inline void store(bf16* p, vf v) {
  const vu u = (vu)v, rounded = v != v ? vu{} + 0x7fc0u : (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  const vu16 bits = __builtin_convertvector(rounded, vu16);
  memcpy(p, &bits, sizeof bits);
}
// Sizes that differ, in branches that this W does not take, are why results pass through bit_cast.
static inline vf load(const half* p) {
#if defined(__AVX512F__)
  if (W == 16) return bit_cast<vf>(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)));
#endif
#if defined(__F16C__)
  return bit_cast<vf>(_mm256_cvtph_ps(W == 8 ? _mm_loadu_si128((const __m128i*)p) : _mm_loadl_epi64((const __m128i*)p)));
#elif defined(__aarch64__)
  return bit_cast<vf>(vcvt_f32_f16(vld1_f16((const __fp16*)p)));
#else
  vf v;
  for (int i = 0; i < W; i++) v[i] = to_float(p[i]);
  return v;
#endif
}
static inline void store(half* p, vf v) {
#if defined(__AVX512F__)
  if (W == 16) return _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(bit_cast<__m512>(v), 0));
#endif
#if defined(__F16C__)
  const __m128i bits = _mm256_cvtps_ph(bit_cast<__m256>(v), 0);
  memcpy(p, &bits, W <= 8 ? W * sizeof *p : 0);
#elif defined(__aarch64__)
  vst1_f16((__fp16*)p, vcvt_f16_f32(bit_cast<float32x4_t>(v)));
#else
  for (int i = 0; i < W; i++) from_float(v[i], p + i);
#endif
}
static inline vf load(const int8_t* p) {
#if defined(__AVX512F__)
  if (W == 16) return bit_cast<vf>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))));
#endif
#if defined(__AVX2__)
  if (W == 8) return bit_cast<vf>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))));
#endif
  vf v;
  for (int i = 0; i < W; i++) v[i] = p[i];
  return v;
}
// int8 beside int16: the products of 2 W numbers, those of neighbours added up, in W sums of 32 bits.
typedef int16_t vi16 __attribute__((vector_size(2 * W * sizeof(int16_t))));
static inline vi16 load(const int16_t* p) { vi16 v; memcpy(&v, p, sizeof v); return v; }
static inline vi16 widen(const int8_t* p) {
#if defined(__AVX512F__)
  if (W == 16) return bit_cast<vi16>(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)));
#endif
#if defined(__AVX2__)
  if (W == 8) return bit_cast<vi16>(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__aarch64__)
  return bit_cast<vi16>(vmovl_s8(vld1_s8(p)));
#endif
  vi16 v;
  for (int i = 0; i < 2 * W; i++) v[i] = p[i];
  return v;
}
static inline vi add_products(vi sum, vi16 a, vi16 b) {
#if defined(__AVX512VNNI__)
  if (W == 16) return bit_cast<vi>(_mm512_dpwssd_epi32(bit_cast<__m512i>(sum), bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif defined(__AVX512F__)
  if (W == 16) return sum + bit_cast<vi>(_mm512_madd_epi16(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#endif
#if defined(__AVX2__)
  if (W == 8) return sum + bit_cast<vi>(_mm256_madd_epi16(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#elif defined(__aarch64__)
  const int16x8_t x = bit_cast<int16x8_t>(a), y = bit_cast<int16x8_t>(b);
  return bit_cast<vi>(vmlal_high_s16(vmlal_s16(bit_cast<int32x4_t>(sum), vget_low_s16(x), vget_low_s16(y)), x, y));
#endif
  for (int i = 0; i < W; i++) sum[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return sum;
}
static inline vf splat(float x) { return x - vf{}; }
template <class V> static inline V held(V v) {  // in a register from here on: the compiler must not load it again for every use
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__AVX2__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}
static inline bool any(vi mask) {  // of lanes that are 0 or -1
#if defined(__AVX512F__)
  if (W == 16) return _mm512_movepi32_mask(bit_cast<__m512i>(mask));
#endif
#if defined(__AVX2__)
  if (W == 8) return _mm256_movemask_ps(bit_cast<__m256>(mask));
#endif
  int set = 0;
  for (int i = 0; i < W; i++) set |= mask[i];
  return set;
}

// Lane i of the result: a[A(i)], or b[A(i) - W] from W on.
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
using Lanes = std::make_index_sequence<W>;
// In every 2 H lanes: H sums of a's (lane i and lane i + H), then H of b's.
template <int H, size_t... I> static inline vf fold(vf a, vf b, std::index_sequence<I...>) {
  const vf kept = (vi){(I & H ? -1 : 0)...} ? b : a, moved = SHUFFLE(a, b, (int)(I & H ? W + I - H : I + H)...);
  return kept + moved;
}
// Adds up the lanes of N vectors, N a power of two, 3 instructions a vector instead of 7. With H = W / 2 the result has
// W / N partial sums of v[0], then of v[1] ...; Q = W / N such results go through it again with H = Q / 2, and each lane
// is a sum: of vector i of result q in lane i * Q + q.
template <int N, int H> static inline vf fold_all(vf* v) {
  if constexpr (N > 1) {
#pragma GCC unroll 16
    for (int i = 0; i < N / 2; i++) v[i] = fold<H>(v[i], v[i + N / 2], Lanes());
    return fold_all<N / 2, H / 2>(v);
  } else {
    return v[0];
  }
}
static inline float sum(vf v) { float s = 0; for (int i = 0; i < W; i++) s += v[i]; return s; }
static inline vf max(vf a, vf b) { return a > b ? a : b; }  // a NaN in a is dropped here, but not by exp2
static inline float max(vf v) { float m = v[0]; for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m; return m; }

// 2^x for x <= 126, to 2e-7; below 2^-126 (minus infinity too) it gives 2^-126, a NaN stays one.
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
