// Pass 2 of the top rung: the weighted sum of a visit to V, as many columns at a time as there are registers for.
#pragma once
#include "scores.h"

struct alignas(64) Partial { float o[D]; float m, l; };  // not yet normalised output, score that weights refer to, their sum

template <int N, int C> static inline void values(const float* w, const Streams& v, Partial* out, int column) {
  constexpr int A = Heads<N>::A, Q = Heads<N>::Q;
  vf o[N][C];
#pragma GCC unroll 16
  for (int i = 0; i < N * C; i++) o[i / C][i % C] = load(out[i / C].o + column + i % C * W);
#pragma GCC unroll 1
  for (int i = 0; i < VISIT; i += A) {
    const float* x = w + i / A / Q * Heads<N>::LANES + i / A % Q;
#pragma GCC unroll 16
    for (int r = 0; r < A; r++) {
      const int j = i % S + r, t = i / S;
      if (__builtin_expect(j * U + t >= v.valid, 0)) continue;
      const KV *row = v.at[j] + t * D + column, *far = v.next[j] + column * U + t * C * W;  // the tile's lines, in order
      vf y[N];
#pragma GCC unroll 16
      for (int g = 0; g < N; g++) y[g] = held(splat(x[Heads<N>::lane(g, r, 0)]));
#pragma GCC unroll 16
      for (int c = 0; c < C; c++) {
        if (c * W % LINE == 0) prefetch(far + c * W);
        const vf numbers = held(load(row + c * W));
#pragma GCC unroll 16
        for (int g = 0; g < N; g++) o[g][c] += numbers * y[g];
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < N * C; i++) store(out[i / C].o + column + i % C * W, o[i / C][i % C]);
}

// ---- All columns ----
template <int N> static inline void values(const float* w, const Streams& v, Partial* out) {
  constexpr int C = std::min(SUMS / N, D / W), LEFT = D / W % C;
  for (int d = 0; d + C * W <= D; d += C * W) values<N, C>(w, v, out, d);
  if constexpr (LEFT > 0) values<N, LEFT>(w, v, out, D - LEFT * W);
}
