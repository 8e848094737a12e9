// Pass 1 of the top rung: the scores of a visit to K, and at once their weights.
#pragma once
#include "streams.h"

// Softmax needs the greatest score, which comes last. So weights are 2^(score - m) with m the greatest of the first visit;
// only a score above m + 64 makes it rise (2^64 is far from overflow), and what was added up until then shrink.
struct alignas(64) Softmax {
  float m[std::max(First::LANES, Last::LANES)], l[std::max(First::LANES, Last::LANES)];  // of each lane
  float unit[INT8 ? std::max(First::LANES, Last::LANES) : 1], *w;  // int8: what a lane's products are multiplied with

  template <int N> [[gnu::noinline, gnu::cold]] void raise(const float* scores, const float* end) {
    constexpr int R = Heads<N>::A * Heads<N>::Q;  // lanes of a head
    for (int first = 0; first < Heads<N>::LANES; first += R) {
      float top = m[first];
      for (int i = first; i < first + R; i++) top = std::max(top, scores[i]);
      const float factor = std::exp2(m[first] - top);
      for (int i = first; i < first + R; i++) {
        m[i] = top;
        l[i] *= factor;
        for (float* p = w + i; p < end; p += Heads<N>::LANES) *p *= factor;
      }
    }
  }
};

// int8 rows are multiplied as integers with queries of 16 bits, twice as many at a time, where whole vectors allow it (with
// floats GQA was a tenth slower). Rounding q moves a score 200 times less than int8 itself does.
constexpr bool INTEGERS = INT8 && STEP % (2 * W) == 0;
constexpr int WIDE = INTEGERS ? 2 * W : W;
using Query = std::conditional_t<INTEGERS, int16_t, float>;
using Sum = std::conditional_t<INTEGERS, vi, vf>;
static_assert(!INTEGERS || D <= 512, "a dot product fits in 32 bits");
template <class E> static inline auto numbers(const E* p) {
  if constexpr (INTEGERS) return widen(p);
  else return load(p);
}
static inline void add(vf& sum, vf x, vf y) { sum += x * y; }
static inline void add(vi& sum, vi16 x, vi16 y) { sum = add_products(sum, x, y); }
// Queries of one head, times `scale`; returns what a product must be multiplied with.
static inline float set_query(const T* q, float scale, float* out) {
  for (int d = 0; d < D; d += W) store(out + d, load(q + d) * scale);
  return 1;
}
static inline float set_query(const T* q, float scale, int16_t* out) {
  vf most = vf{} + 1e-30f;
  for (int d = 0; d < D; d += W) most = max(magnitude(load(q + d)), most);
  const float unit = max(most) / 32767;
  for (int d = 0; d < D; d += W) store_rounded(out + d, load(q + d) / unit);
  return unit * scale;
}

template <int N> static inline void dot_rows(const Query* q, Streams& k, int row, Sum* dots) {
  constexpr int A = Heads<N>::A, E = 2 * N * A <= SUMS && STEP / WIDE % 2 == 0 ? 2 : 1;  // E: sums apart, for the FMA's latency
  constexpr int EVERY = S / A * (LINE / STEP);  // as many steps as lines of each stream
  const KV* const* from = k.at + row % S;
  const int offset = row / S * D;
  Sum sum[E][N * A] = {};
#pragma GCC unroll 1
  for (int d0 = 0; d0 < D; d0 += STEP) {
    const int step = row / A * (D / STEP) + d0 / STEP;
    if (step % EVERY == 0 && step / EVERY % 8 < 7) k.ask();  // `weigh` asks for the rest
#pragma GCC unroll 16
    for (int d = 0; d < STEP; d += WIDE) {
      decltype(load(q)) y[N];
#pragma GCC unroll 16
      for (int g = 0; g < N; g++) y[g] = held(load(q + g * D + d0 + d));
#pragma GCC unroll 16
      for (int r = 0; r < A; r++) {
        const auto x = held(numbers(from[r] + offset + d0 + d));
#pragma GCC unroll 16
        for (int g = 0; g < N; g++) add(sum[d / WIDE % E][g * A + r], x, y[g]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < N * A; i++) dots[i] = E == 2 ? sum[0][i] + sum[E - 1][i] : sum[0][i];
}

template <int N, size_t... I> static inline vf in_lanes(const float* scale, std::index_sequence<I...>) {  // of Q steps
  return SHUFFLE(load(scale), load(scale), (int)(I % Heads<N>::Q * Heads<N>::A + I / Heads<N>::Q % Heads<N>::A)...);
}
// Slots that no token has may hold anything, NaN too.
template <int N> [[gnu::noinline, gnu::cold]] static void forget_from(int valid, float* w) {
  constexpr int A = Heads<N>::A, Q = Heads<N>::Q, LANES = Heads<N>::LANES;
  for (int i = 0; i < Heads<N>::weights(VISIT); i++) {
    const int row = i / LANES * Q * A + i % Q * A + i % LANES / Q % A;  // in the order of the visit
    if (row % S * U + row / S >= valid) w[i] = -INFINITY;
  }
}
// The visit's scores become weights, all at once: one by one, each would wait for the one before through a long chain.
template <int N> [[gnu::noinline]] static void weigh(Streams& k, Softmax& soft, float* w) {
  constexpr int LANES = Heads<N>::LANES, ALL = Heads<N>::weights(VISIT), STEPS = Heads<N>::A * Heads<N>::Q;
  if (INT8)
    for (int i = 0; i < ALL; i += W)
      store(w + i, load(w + i) * in_lanes<N>(k.k_scale + i / LANES * STEPS, Lanes()) * load(soft.unit + i % LANES));
  if (__builtin_expect(k.valid < VISIT, 0)) forget_from<N>(k.valid, w);
  alignas(64) float top[LANES];
  vi above = {};
  for (int v = 0; v < LANES; v += W) {
    vf most = load(w + v);
    for (int i = v + LANES; i < ALL; i += LANES) most = max(load(w + i), most);
    above |= most > load(soft.m + v) + 64.f;
    store(top + v, most);
  }
  if (__builtin_expect(any(above), 0)) soft.raise<N>(top, w);
  for (int v = 0; v < LANES; v += W) {
    const vf m = load(soft.m + v);
    vf l = load(soft.l + v);
    for (int i = v; i < ALL; i += LANES) {
      if (i / W % 2) k.ask();
      const vf e = exp2(load(w + i) - m);
      l += e;
      store(w + i, INT8 ? e * in_lanes<N>(k.v_scale + i / LANES * STEPS, Lanes()) : e);  // V's scale belongs to the weight
    }
    store(soft.l + v, l);
  }
}
template <int N> static inline void scores(const Query* q, Streams& k, Softmax& soft, float* w) {
  constexpr int A = Heads<N>::A, Q = Heads<N>::Q, SCORES = Heads<N>::SCORES, LANES = Heads<N>::LANES;
  float* to = w;
#pragma GCC unroll 1
  for (int i = 0; i < VISIT; i += Q * A, to += LANES) {
    if constexpr (Q == 1) {
      Sum dots[SCORES] = {};
      dot_rows<N>(q, k, i, dots);
#pragma GCC unroll 16
      for (int v = 0; v < LANES / W; v++) store(to + v * W, to_floats(fold_all<W, W / 2>(dots + v * W)));
    } else {
      Sum parts[Q];
#pragma GCC unroll 1
      for (int c = 0, j = i; c < Q; c++, j += A) {
        Sum dots[SCORES] = {};
        dot_rows<N>(q, k, j, dots);
        parts[c] = fold_all<SCORES, W / 2>(dots);
      }
      store(to, to_floats(fold_all<Q, Q / 2>(parts)));
    }
  }
  weigh<N>(k, soft, w);
}
