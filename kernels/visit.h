// One visit of the top rung: some rows of one KV head, for all query heads that share it, in the registers. `flash.cpp`
// decides who visits what and when; here is how memory is read, and the two passes over a visit: K, then V.
#pragma once
#include "attention.h"

constexpr int power_of_two(int most, int divides) {  // the greatest one that is at most `most` and divides `divides`
  int p = 1;
  while (p * 2 <= most && divides % (p * 2) == 0) p *= 2;
  return p;
}
constexpr int up_to_power_of_two(int n) { return n <= 1 ? 1 : 2 * up_to_power_of_two((n + 1) / 2); }

// ---- The order of the visits ----
// A visit reads U rows of one KV head in each of S streams (S blocks, or parts of them), a row of each in turn; then
// comes the next head, whose rows follow in memory. A stream in strict order keeps the hardware's prefetcher running,
// and several of them hide that a block of a few KiB ends soon: 1 stream gained less, and so did reading rows by column.
constexpr int U = power_of_two(16, BS), LINE = 64 / sizeof(KV);  // numbers in a cache line
constexpr int STEP = D % LINE == 0 && W < LINE ? LINE : W;       // numbers between two prefetches

// N query heads at a time, whose scores fill the registers: a step gives A * N, one row of each of A streams, and Q steps
// fill vectors. The weights stay in that order in memory: lane (head, stream, step).
template <int N> struct Heads {
  static constexpr int A = power_of_two(SUMS / N, 4), SCORES = up_to_power_of_two(N * A);
  static constexpr int Q = std::max(1, W / SCORES), LANES = Q * SCORES;
  static constexpr int lane(int g, int stream, int step) { return (g * A + stream) * Q + step % Q; }
};
constexpr int MOST = std::min(G, 4), REST = G % MOST, CHUNKS = (G + MOST - 1) / MOST;
template <class F> static inline void for_chunks(F f) {  // of the group's heads: MOST at a time, then the rest
  for (int c = 0; c < G / MOST; c++) f(std::integral_constant<int, MOST>(), c);
  if constexpr (REST > 0) f(std::integral_constant<int, REST>(), CHUNKS - 1);
}
using First = Heads<MOST>;
using Last = Heads<REST ? REST : MOST>;
constexpr int streams_for_whole_vectors(int s) { return s * U / First::A % First::Q || s * U / Last::A % Last::Q ? streams_for_whole_vectors(2 * s) : s; }
constexpr int S = streams_for_whole_vectors(4), VISIT = S * U;  // tokens
constexpr int ROOM = std::max(VISIT / First::A / First::Q * First::LANES, VISIT / Last::A / Last::Q * Last::LANES);

struct Span { int seq, start, tokens; };
struct Streams {
  const KV *at[S], *next[S];  // this head's rows; those of the visit after this one
  int valid;                  // tokens: fewer than VISIT in a span's last visit
  float k_scale[INT8 ? VISIT + W : 1], v_scale[INT8 ? VISIT + W : 1];  // int8, in the order of the visit

  Streams(const AttentionArgs& a, const void* cache, const void* then, const Span& span, int t, int head) : valid(span.tokens - t) {
    locate(at, a, cache, span, t, head);
    if (head + 1 < a.kv_heads) locate(next, a, cache, span, t, head + 1);
    else if (t + VISIT < span.tokens) locate(next, a, cache, span, t + VISIT, 0);
    else locate(next, a, then, span, 0, 0);
  }
  static void locate(const KV** p, const AttentionArgs& a, const void* cache, const Span& span, int t, int head) {
    const int last = (span.tokens - 1) / U * U;  // streams past the end read the last rows again, and are forgotten
    for (int j = 0; j < S; j++) p[j] = (const KV*)cache + row_of(a, span.seq, head, span.start + std::min(t + j * U, last)) * D;
  }
  void load_scales(const AttentionArgs& a) {
    float numbers[2][S][U + W];
    for (int j = 0; j < S; j++) {
      const size_t row = (at[j] - (const KV*)a.k_cache) / D;
      if (U % W == 0)
        for (int t = 0; t < U; t += W) {
          store(numbers[0][j] + t, load((const half*)a.k_scale + row + t));
          store(numbers[1][j] + t, load((const half*)a.v_scale + row + t));
        }
      else
        for (int t = 0; t < U; t++) {
          numbers[0][j][t] = to_float(((const half*)a.k_scale)[row + t]);
          numbers[1][j][t] = to_float(((const half*)a.v_scale)[row + t]);
        }
    }
    for (int t = 0; t < U; t++)
      for (int j = 0; j < S; j++) k_scale[t * S + j] = numbers[0][j][t], v_scale[t * S + j] = numbers[1][j][t];
  }
};
// Into which cache a row is asked for. On two cores of each, as a share of the streaming read: Zen 5 gains by going past the
// L2 cache, since a row is read once (GQA 0.80, through L1 0.72); Zen 4 by stopping there (GQA 0.77, MHA 0.90; through L1 or
// past L2 0.70 and 0.82). Intel's lose a third past L2 (MHA on 16 cores of Sapphire Rapids: 84 GB/s, through L1 127).
static inline void prefetch(const KV* p) {
#if !defined(__znver3__) && !defined(__znver4__) && !defined(__znver5__)
  __builtin_prefetch(p, 0, 3);
#elif defined(__AVX512VP2INTERSECT__)  // Zen 5, which an older compiler takes for a Zen 3
  __builtin_prefetch(p, 0, 0);
#else
  __builtin_prefetch(p, 0, 2);
#endif
}

// ---- Pass 1: scores, and at once their weights ----
// Softmax needs the greatest score, which comes last. So weights are 2^(score - m) with m the greatest of the first few;
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

// int8 rows are multiplied as integers with queries of 16 bits, twice as many at a time, where whole vectors allow it: GQA
// reads 0.67 of the streaming read instead of 0.61. Rounding q moves a score 200 times less than int8 itself does.
constexpr bool INTEGERS = INT8 && STEP % (2 * W) == 0;
constexpr int WIDE = INTEGERS ? 2 * W : W;
using Query = std::conditional_t<INTEGERS, int16_t, float>;
using Sum = std::conditional_t<INTEGERS, vi, vf>;
template <class E> static inline auto numbers(const E* p) {
  if constexpr (INTEGERS) return widen(p);
  else return load(p);
}
static inline void add(vf& sum, vf x, vf y) { sum += x * y; }
static inline void add(vi& sum, vi16 x, vi16 y) { sum = add_products(sum, x, y); }
static inline vf to_floats(vf v) { return v; }
static inline vf to_floats(vi v) { return __builtin_convertvector(v, vf); }
// Queries of one head, times `scale`; returns what a product must be multiplied with.
static inline float set_query(const T* q, float scale, float* out) {
  for (int d = 0; d < D; d += W) store(out + d, load(q + d) * scale);
  return 1;
}
static inline float set_query(const T* q, float scale, int16_t* out) {
  float most = 1e-30f;
  for (int d = 0; d < D; d++) most = std::max(most, std::fabs(to_float(q[d])));
  for (int d = 0; d < D; d++) out[d] = std::lrint(to_float(q[d]) * (32767 / most));
  return most / 32767 * scale;
}

template <int N> static inline void dot_rows(const Query* q, const KV* const* k, const KV* const* next, int offset, vf* dots) {
  constexpr int A = Heads<N>::A, E = 2 * N * A <= SUMS && STEP / WIDE % 2 == 0 ? 2 : 1;  // E: sums apart, for the FMA's latency
  Sum sum[E][N * A] = {};
#pragma GCC unroll 1
  for (int d0 = 0; d0 < D; d0 += STEP) {
#pragma GCC unroll 16
    for (int r = 0; r < A; r++) prefetch(next[r] + offset + d0);
#pragma GCC unroll 16
    for (int d = 0; d < STEP; d += WIDE) {
      decltype(load(q)) y[N];
#pragma GCC unroll 16
      for (int g = 0; g < N; g++) y[g] = held(load(q + g * D + d0 + d));
#pragma GCC unroll 16
      for (int r = 0; r < A; r++) {
        const auto x = held(numbers(k[r] + offset + d0 + d));
#pragma GCC unroll 16
        for (int g = 0; g < N; g++) add(sum[d / WIDE % E][g * A + r], x, y[g]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < N * A; i++) dots[i] = to_floats(E == 2 ? sum[0][i] + sum[E - 1][i] : sum[0][i]);
}

template <int N, size_t... I> static inline vf in_lanes(const float* scale, std::index_sequence<I...>) {  // of Q steps
  return SHUFFLE(load(scale), load(scale), (int)(I % Heads<N>::Q * Heads<N>::A + I / Heads<N>::Q % Heads<N>::A)...);
}
template <int N> static inline void weigh(vf* x, const Streams& k, int i, Softmax& soft, float* w) {
  constexpr int A = Heads<N>::A, LANES = Heads<N>::LANES;
  float scores[LANES];
  if (INT8) for (int v = 0; v < LANES / W; v++) x[v] *= in_lanes<N>(k.k_scale + i, Lanes()) * load(soft.unit + v * W);
  if (__builtin_expect(k.valid < VISIT, 0)) {  // slots that no token has may hold anything, NaN too
    memcpy(scores, x, sizeof scores);
    for (int l = 0; l < LANES; l++) {
      const int row = i + l % Heads<N>::Q * A + l / Heads<N>::Q % A;  // in the order of the visit
      if (row % S * U + row / S >= k.valid) scores[l] = -INFINITY;
    }
    memcpy(x, scores, sizeof scores);
  }
  vi above = {};
  for (int v = 0; v < LANES / W; v++) above |= x[v] > load(soft.m + v * W) + 64.f;
  if (__builtin_expect(any(above), 0)) {
    memcpy(scores, x, sizeof scores);
    soft.raise<N>(scores, w);
  }
  for (int v = 0; v < LANES / W; v++) {
    const vf e = exp2(x[v] - load(soft.m + v * W));
    store(soft.l + v * W, load(soft.l + v * W) + e);
    store(w + v * W, INT8 ? e * in_lanes<N>(k.v_scale + i, Lanes()) : e);  // V's scale belongs to the weight
  }
}
template <int N> static inline void scores(const Query* q, const Streams& k, Softmax& soft, float* w) {
  constexpr int A = Heads<N>::A, Q = Heads<N>::Q, SCORES = Heads<N>::SCORES, LANES = Heads<N>::LANES;
#pragma GCC unroll 1
  for (int i = 0; i < VISIT; i += Q * A, w += LANES) {
    vf x[std::max(Q, LANES / W)];
    if constexpr (Q == 1) {
      vf dots[SCORES] = {};
      dot_rows<N>(q, k.at + i % S, k.next + i % S, i / S * D, dots);
#pragma GCC unroll 16
      for (int v = 0; v < LANES / W; v++) x[v] = fold_all<W, W / 2>(dots + v * W);
    } else {
      float parts[Q][W];
#pragma GCC unroll 1
      for (int c = 0, j = i; c < Q; c++, j += A) {
        vf dots[SCORES] = {};
        dot_rows<N>(q, k.at + j % S, k.next + j % S, j / S * D, dots);
        store(parts[c], fold_all<SCORES, W / 2>(dots));
      }
#pragma GCC unroll 16
      for (int c = 0; c < Q; c++) x[c] = load(parts[c]);
      x[0] = fold_all<Q, Q / 2>(x);
    }
    weigh<N>(x, k, i, soft, w);
  }
}

// ---- Pass 2: the weighted sum of V, as many columns at a time as there are registers for ----
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

