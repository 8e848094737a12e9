// Arithmetic on vectors of W floats, in the compiler's own vector extensions: the same source for every processor.
#pragma once
#include <utility>
#include "simd.h"

static inline vf splat(float x) { return x - vf{}; }
static inline vf to_floats(vf v) { return v; }
static inline vf to_floats(vi v) { return __builtin_convertvector(v, vf); }
// Rounded to the nearest, ties to even: adding 1.5 * 2^23 leaves an integer in the low bits.
static inline vi round_to_int(vf v) { return (vi)(v + 12582912.f) - 0x4b400000; }
template <class E> static inline void store_rounded(E* p, vf v) {
  typedef E ve __attribute__((vector_size(W * sizeof(E))));
  const ve x = __builtin_convertvector(round_to_int(v), ve);
  memcpy(p, &x, sizeof x);
}
static inline void store_bytes(uint8_t* p, vi v) {  // the lowest of each lane
  typedef uint8_t vb __attribute__((vector_size(W)));
  const vb x = __builtin_convertvector(v, vb);
  memcpy(p, &x, sizeof x);
}
static inline vi four_bytes(const uint8_t* p) { int32_t x; memcpy(&x, p, sizeof x); return vi{} + x; }  // in every lane
static inline float sum(vf v) { float s = 0; for (int i = 0; i < W; i++) s += v[i]; return s; }
static inline vf max(vf a, vf b) { return a > b ? a : b; }  // a NaN in a is dropped here, but not by exp2
static inline vf min(vf a, vf b) { return a < b ? a : b; }
static inline vf magnitude(vf v) { return max(v, -v); }
static inline float max(vf v) { float m = v[0]; for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m; return m; }

// Lane i of the result: a[A(i)], or b[A(i) - W] from W on.
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
using Lanes = std::make_index_sequence<W>;
// In every 2 H lanes: H sums of a's (lane i and lane i + H), then H of b's.
template <int H, class V, size_t... I> static inline V fold(V a, V b, std::index_sequence<I...>) {
  const V kept = (vi){(I & H ? -1 : 0)...} ? b : a, moved = SHUFFLE(a, b, (int)(I & H ? W + I - H : I + H)...);
  return kept + moved;
}
// The greatest of every R lanes, R a power of two, in each of them.
template <int H, size_t... I> static inline vf max_of_pairs(vf v, std::index_sequence<I...>) {
  return max(v, SHUFFLE(v, v, (int)(I ^ H)...));
}
template <int R> static inline vf max_of(vf v) {
  if constexpr (R > 1) return max_of_pairs<R / 2>(max_of<R / 2>(v), Lanes());
  else return v;
}
// Adds up the lanes of N vectors, N a power of two, 3 instructions a vector instead of 7. With H = W / 2 the result has
// W / N partial sums of v[0], then of v[1] ...; Q = W / N such results go through it again with H = Q / 2, and each lane
// is a sum: of vector i of result q in lane i * Q + q.
template <int N, int H, class V> static inline V fold_all(V* v) {
  if constexpr (N > 1) {
#pragma GCC unroll 16
    for (int i = 0; i < N / 2; i++) v[i] = fold<H>(v[i], v[i + N / 2], Lanes());
    return fold_all<N / 2, H / 2>(v);
  } else {
    return v[0];
  }
}

// Like cards: the numbers of the second half between those of the first, E at a time. log2(N) riffles of N rows, one after
// the other, bring together what stands in one column.
template <int E, size_t... I> static inline void riffle(vf a, vf b, vf* out, std::index_sequence<I...>) {
  out[0] = SHUFFLE(a, b, (int)(I / E % 2 * W + I / E / 2 * E + I % E)...);
  out[1] = SHUFFLE(a, b, (int)(I / E % 2 * W + I / E / 2 * E + I % E + W / 2)...);
}
template <int E, int N> static inline void riffle(vf (&x)[N]) {
  vf out[N];
#pragma GCC unroll 16
  for (int i = 0; i < N / 2; i++) riffle<E>(x[i], x[i + N / 2], out + 2 * i, Lanes());
  memcpy(x, out, sizeof x);
}

// ---- Products of bytes, where simd.h has nothing better (BYTE_PRODUCTS) ----
// 4 rows of 4 W bytes -> the 4 bytes of each column side by side: column 16 (l / 4) + 4 c + l % 4 in lane l of out[c].
template <class B> static inline void interleave(const B* const* row, vi* out) {
  for (int i = 0; i < 16 * W; i++) ((B*)out)[i] = row[i % 4][i / 4 % W / 4 * 16 + i / 4 / W * 4 + i / 4 % 4];
}
// Bytes without a sign times bytes with one; the products of 4 neighbours are added up.
template <class V> static inline vi add_byte_products(vi sum, V a, V b) {
  for (int i = 0; i < 4 * W; i++) sum[i / 4] += ((const uint8_t*)&a)[i] * ((const int8_t*)&b)[i];
  return sum;
}

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
