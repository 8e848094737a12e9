// Pass 2 of the top rung: the weighted sum of a visit to V, as many columns at a time as there are registers for.
#pragma once
#include "scores.h"

struct alignas(64) Partial { float o[D]; float m, l; };  // not yet normalised output, score that weights refer to, their sum

// ---- As floats: any format, any processor ----
template <int N, int C> static inline void values(const float* w, Streams& v, Partial* out, int column) {
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

// ---- int8, in bytes: 4 tokens a product ----
// V stays in bytes, so that it need not be widened; each weight is two of them, 16 bits of the greatest one of its visit and
// head (with 8 alone the error is 8e-3 instead of 2e-5), and the products with either are added up apart.
#ifdef BYTE_PRODUCTS
constexpr bool BYTES = INTEGERS;
#else
constexpr bool BYTES = false;
#endif
static_assert(!BYTES || VISIT <= 256, "the sums of a visit's products fit in 32 bits");
template <int N> struct Weights {
  static constexpr int COUNT = Heads<N>::weights(VISIT), LANES = Heads<N>::LANES;
  static constexpr int R = Heads<N>::A * Heads<N>::Q;  // lanes of a head
  static constexpr int ASKED = COUNT / W / 2 * LINE;  // numbers of each stream's next rows, while the bytes are made
  alignas(64) uint8_t bytes[2 * COUNT];  // LANES high ones, LANES low ones, of step after step
  alignas(64) float unit[LANES];

  Weights(const float* w, Streams& v) {
    vf most = vf{} + 1e-30f;
    for (int i = 0; i < COUNT; i += W) most = max(most, load(w + i));
    most = max_of<R>(most);
    store(unit, most / 65535.f);
    const vf factor = 65535.f / most;
    for (int i = 0; i < COUNT; i += W) {
      if (i / W % 2) v.ask();
      const vi weight = round_to_int(load(w + i) * factor);
      store_bytes(bytes + 2 * i, weight >> 8);
      store_bytes(bytes + 2 * i + W, weight);
    }
  }
};
template <int N, int FIRST, int C> static inline void values(const Weights<N>& w, Streams& v, Partial* out, int column) {
  constexpr int A = Heads<N>::A, Q = Heads<N>::Q, LANES = Heads<N>::LANES, R = A * Q;
  vi high[N][C] = {}, low[N][C] = {};
#pragma GCC unroll 1
  for (size_t i = 0; i < VISIT; i += R) {
    const uint8_t* const weights = w.bytes + i / R * 2 * LANES;
#pragma GCC unroll 4
    for (size_t first = 0; first < R; first += 4) {  // 4 lanes of each head
      const KV* row[4];
#pragma GCC unroll 4
      for (int e = 0; e < 4; e++) {
        const size_t lane = first + e, step = i + lane % Q * A, j = step % S + lane / Q, t = step / S;
        row[e] = v.at[j] + t * D + column;
      }
      const int part = (column / W + FIRST) * VISIT / 4 + C * (int)(i + first + 4) / 4;
      if (v.asked < w.ASKED + (U * D - w.ASKED) * part / (D / W * VISIT / 4)) v.ask();
      vi numbers[4];
      interleave(row, numbers);
#pragma GCC unroll 4
      for (size_t g = 0; g < N; g++) {
        const vi h = held(four_bytes(weights + g * R + first)), l = held(four_bytes(weights + LANES + g * R + first));
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          high[g][c] = add_byte_products(high[g][c], h, numbers[FIRST + c]);
          low[g][c] = add_byte_products(low[g][c], l, numbers[FIRST + c]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < N; g++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      float* o = out[g].o + column + (FIRST + c) * W;
      store(o, load(o) + to_floats((high[g][c] << 8) + low[g][c]) * w.unit[g * R]);
    }
}
// Columns in their order again, from that of `interleave`.
static inline void in_order(Partial& out) {
  vf x[4];
  for (int d = 0; d < D; d += 4 * W) {
    memcpy(x, out.o + d, sizeof x);
    riffle<4>(x), riffle<4>(x);
    memcpy(out.o + d, x, sizeof x);
  }
}

// ---- All columns ----
template <int N> static inline void values(const float* w, Streams& v, Partial* out) {
  if constexpr (BYTES) {
    const Weights<N> weights(w, v);
    for (int d = 0; d < D; d += 4 * W)
      if constexpr (N > 2) values<N, 0, 2>(weights, v, out, d), values<N, 2, 2>(weights, v, out, d);  // as registers allow
      else values<N, 0, 4>(weights, v, out, d);
  } else {
    constexpr int C = std::min(SUMS / N, D / W), LEFT = D / W % C;
    for (int d = 0; d + C * W <= D; d += C * W) values<N, C>(w, v, out, d);
    if constexpr (LEFT > 0) values<N, LEFT>(w, v, out, D - LEFT * W);
  }
}
