// The one file that knows instruction sets: formats of numbers, and how W of them are read and written at once. What is done
// with vectors (`a * b + c` becomes an FMA by itself) is GCC's and clang's vector extensions everywhere else, so that only
// conversions, a test and products of bytes need intrinsics: a few lines for each of AVX-512, AVX2 and NEON, none elsewhere.
// Not used, because it gained nothing: AVX-512 BF16's dot product (the kernel waits for memory, and bf16 widens with one
// shift). AVX-512 FP16 would add up in half precision.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// WIDTH: floats in a vector, a divisor of HEAD_DIM. SUMS: how many running sums fit in the registers beside the rest.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define ISA "AVX-512"
#define WIDTH (HEAD_DIM % 16 ? 8 : 16)
#define SUMS 16
#define REGISTER "+v"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ISA "AVX2"
#define WIDTH 8
#define SUMS 8
#define REGISTER "+x"
#elif defined(__aarch64__)
#define ISA "NEON"
#define WIDTH 4
#define SUMS 16
#define REGISTER "+w"
#else
#define ISA "generic"
#define WIDTH 4
#define SUMS 8
#endif
constexpr int W = WIDTH;
static inline void relax() {  // between two looks at a word in memory
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}
static_assert(HEAD_DIM % 8 == 0, "head_dim must be a multiple of 8");
typedef float vf __attribute__((vector_size(W * sizeof(float))));
typedef int32_t vi __attribute__((vector_size(W * sizeof(int32_t))));
typedef uint32_t vu __attribute__((vector_size(W * sizeof(uint32_t))));
typedef uint16_t vu16 __attribute__((vector_size(W * sizeof(uint16_t))));
typedef int16_t vi16 __attribute__((vector_size(2 * W * sizeof(int16_t))));

// ---- Number formats, one at a time ----
struct half { uint16_t bits; };
struct bf16 { uint16_t bits; };
template <class To, class From> static inline To bit_cast(const From& x) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
static inline float to_float(float x) { return x; }
static inline float to_float(int8_t x) { return x; }
static inline float to_float(bf16 x) { return bit_cast<float>((uint32_t)x.bits << 16); }
static inline void from_float(float x, float* p) { *p = x; }
static inline void from_float(float x, bf16* p) {  // to the nearest, ties to even
  const uint32_t u = bit_cast<uint32_t>(x);
  p->bits = x != x ? 0x7fc0 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
#if defined(__F16C__)
static inline float to_float(half x) { return _cvtsh_ss(x.bits); }
static inline void from_float(float x, half* p) { p->bits = _cvtss_sh(x, 0); }
#elif defined(__aarch64__)
static inline float to_float(half x) { return bit_cast<__fp16>(x.bits); }
static inline void from_float(float x, half* p) { p->bits = bit_cast<uint16_t>((__fp16)x); }
#else
static inline float to_float(half x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00) return bit_cast<float>(sign | 0x7f800000u | rest << 13);  // infinity, NaN
  return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(rest << 13) * 0x1p112f));
}
static inline void from_float(float x, half* p) {
  const uint32_t u = bit_cast<uint32_t>(x), sign = u >> 16 & 0x8000u, rest = u & 0x7fffffffu;
  uint32_t h;
  if (rest >= 0x47800000u) h = rest > 0x7f800000u ? 0x7e00 : 0x7c00;  // NaN; beyond 65,504 becomes infinity
  else if (rest < 0x38800000u) h = bit_cast<uint32_t>(bit_cast<float>(rest) + 0.5f) - 0x3f000000u;  // subnormal
  else h = (rest + 0xc8000fffu + (rest >> 13 & 1)) >> 13;
  p->bits = sign | h;
}
#endif

// ---- W at a time, as it can be done anywhere ----
template <class E> static inline vf load(const E* p) { vf v; for (int i = 0; i < W; i++) v[i] = to_float(p[i]); return v; }
template <class E> static inline void store(E* p, vf v) { for (int i = 0; i < W; i++) from_float(v[i], p + i); }
static inline vf load(const float* p) { vf v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
static inline vf load(const bf16* p) { vu16 v; memcpy(&v, p, sizeof v); return (vf)(__builtin_convertvector(v, vu) << 16); }
static inline void store(bf16* p, vf v) {
  const vu u = (vu)v, rounded = v != v ? vu{} + 0x7fc0u : (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  const vu16 bits = __builtin_convertvector(rounded, vu16);
  memcpy(p, &bits, sizeof bits);
}
static inline vi16 load(const int16_t* p) { vi16 v; memcpy(&v, p, sizeof v); return v; }
template <class E> static inline vi16 widen(const E* p) { vi16 v; for (int i = 0; i < 2 * W; i++) v[i] = p[i]; return v; }
// int8 beside int16: the products of 2 W numbers, those of neighbours added up, in W sums of 32 bits.
template <class V> static inline vi add_products(vi sum, V a, V b) {
  for (int i = 0; i < W; i++) sum[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return sum;
}
// Of lanes that are 0 or -1.
template <class V> static inline bool any(V mask) { int set = 0; for (int i = 0; i < W; i++) set |= mask[i]; return set; }
template <class V> static inline V held(V v) {  // in a register from here on: the compiler must not load it again for every use
#ifdef REGISTER
  asm("" : REGISTER(v));
#endif
  return v;
}

// ---- W at a time, as this processor does it: an overload that is no template goes first ----
#if WIDTH == 16
static inline vf load(const half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline void store(half* p, vf v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, 0)); }
static inline vf load(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
static inline vi16 widen(const int8_t* p) { return (vi16)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
#ifdef __AVX512VNNI__
static inline vi add_products(vi sum, vi16 a, vi16 b) { return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b); }
#define BYTE_PRODUCTS  // fast ones: as vectors.h defines them for any processor
static inline void interleave(const int8_t* const* row, vi* out) {
  __m512i r[4];
  for (int i = 0; i < 4; i++) r[i] = _mm512_loadu_si512(row[i]);
  const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpacklo_epi8(r[2], r[3]);
  const __m512i c = _mm512_unpackhi_epi8(r[0], r[1]), d = _mm512_unpackhi_epi8(r[2], r[3]);
  out[0] = (vi)_mm512_unpacklo_epi16(a, b), out[1] = (vi)_mm512_unpackhi_epi16(a, b);
  out[2] = (vi)_mm512_unpacklo_epi16(c, d), out[3] = (vi)_mm512_unpackhi_epi16(c, d);
}
static inline vi add_byte_products(vi sum, vi a, vi b) { return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b); }
#else
static inline vi add_products(vi sum, vi16 a, vi16 b) { return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#endif
static inline bool any(vi mask) { return _mm512_movepi32_mask((__m512i)mask); }
#elif WIDTH == 8
static inline vf load(const half* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline void store(half* p, vf v) { const __m128i bits = _mm256_cvtps_ph(v, 0); memcpy(p, &bits, sizeof bits); }
static inline vf load(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
static inline vi16 widen(const int8_t* p) { return (vi16)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
static inline vi add_products(vi sum, vi16 a, vi16 b) { return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
static inline bool any(vi mask) { return _mm256_movemask_ps((__m256)mask); }
#elif defined(__aarch64__)
static inline vf load(const half* p) { return (vf)vcvt_f32_f16(vld1_f16((const __fp16*)p)); }
static inline void store(half* p, vf v) { vst1_f16((__fp16*)p, vcvt_f16_f32((float32x4_t)v)); }
static inline vi16 widen(const int8_t* p) { return (vi16)vmovl_s8(vld1_s8(p)); }
static inline vi add_products(vi sum, vi16 a, vi16 b) {
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return (vi)vmlal_high_s16(vmlal_s16((int32x4_t)sum, vget_low_s16(x), vget_low_s16(y)), x, y);
}
#endif
