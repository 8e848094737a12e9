// Arithmetic on vectors of W floats, in the compiler's own vector extensions: the same source for every processor.
#pragma once
#include <utility>
#include "simd.h"

static inline vf splat(float x) { return x - vf{}; }
static inline float sum(vf v) { float s = 0; for (int i = 0; i < W; i++) s += v[i]; return s; }
static inline vf max(vf a, vf b) { return a > b ? a : b; }  // a NaN in a is dropped here, but not by exp2
static inline float max(vf v) { float m = v[0]; for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m; return m; }

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
