// How the top rung reads memory, visit by visit. A visit is some rows of one KV head, for all query heads that share it, in
// the registers: `scores.h` visits K, `values.h` V, and `flash.cpp` decides who visits what and when.
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
  static constexpr int weights(int visit) { return visit / A / Q * LANES; }
  static constexpr int lane(int g, int stream, int step) { return (g * A + stream) * Q + step % Q; }
};
constexpr int MOST = std::min(G, 4), REST = G % MOST, CHUNKS = (G + MOST - 1) / MOST;
template <class F> static inline void for_chunks(F f) {  // of the group's heads: MOST at a time, then the rest
  for (int c = 0; c < G / MOST; c++) f(std::integral_constant<int, MOST>(), c);
  if constexpr (REST > 0) f(std::integral_constant<int, REST>(), CHUNKS - 1);
}
using First = Heads<MOST>;
using Last = Heads<REST ? REST : MOST>;
constexpr int streams_for_whole_vectors(int s) {
  return s * U < 2 * W || s * U / First::A % First::Q || s * U / Last::A % Last::Q ? streams_for_whole_vectors(2 * s) : s;
}
constexpr int S = streams_for_whole_vectors(4), VISIT = S * U;  // tokens
constexpr int ROOM = std::max(First::weights(VISIT), Last::weights(VISIT));

// Into which cache a row is asked for. On two cores of each, as a share of the streaming read: Zen 5 gains by going past the
// L2 cache, since a row is read once (GQA 0.80, through L1 0.72); Zen 4 by stopping there (GQA 0.77, MHA 0.90; through L1 or
// past L2 0.70 and 0.82). Intel's lose a third past L2 (MHA on 16 cores of Sapphire Rapids: 84 GB/s, through L1 127).
static inline void prefetch(const void* p) {
#if !defined(__znver3__) && !defined(__znver4__) && !defined(__znver5__)
  __builtin_prefetch(p, 0, 3);
#elif defined(__AVX512VP2INTERSECT__)  // Zen 5, which an older compiler takes for a Zen 3
  __builtin_prefetch(p, 0, 0);
#else
  __builtin_prefetch(p, 0, 2);
#endif
}

struct Span { int seq, start, tokens; };
struct Streams {
  size_t row[S], next_row[S];  // numbers of this head's rows; of those of the visit after this one
  const KV *at[S], *next[S];
  int asked = 0;  // numbers of each of the next streams
  int valid;      // tokens: fewer than VISIT in a span's last visit
  float k_scale[INT8 ? VISIT + W : 1], v_scale[INT8 ? VISIT + W : 1];  // int8, in the order of the visit

  Streams(const AttentionArgs& a, const void* cache, const void* then, const Span& span, int t, int head)
      : valid(span.tokens - t) {
    const bool same = head + 1 < a.kv_heads, last = !same && t + VISIT >= span.tokens;
    locate(row, a, span, t, head);
    locate(next_row, a, span, same ? t : last ? 0 : t + VISIT, same ? head + 1 : 0);
    for (int j = 0; j < S; j++) {
      at[j] = (const KV*)cache + row[j] * D;
      next[j] = (const KV*)(last ? then : cache) + next_row[j] * D;
    }
  }
  static void locate(size_t* row, const AttentionArgs& a, const Span& span, int t, int head) {
    const int last = (span.tokens - 1) / U * U;  // streams past the end read the last rows again, and are forgotten
    for (int j = 0; j < S; j++) row[j] = row_of(a, span.seq, head, span.start + std::min(t + j * U, last));
  }
  // Asks for one more line of each of the next visit's streams. Memory must never rest: with lines asked for evenly, also
  // while scores become weights, and weights bytes, fp16 reads 2 % faster and int8 8 %.
  void ask() {
    if (asked >= U * D) return;
#pragma GCC unroll 4
    for (int j = 0; j < S; j++) prefetch(next[j] + asked);
    asked += LINE;
  }
  void load_scales(const AttentionArgs& a) {
    load_scales((const half*)a.k_scale, k_scale);
    load_scales((const half*)a.v_scale, v_scale);
  }
  void load_scales(const half* scale, float* out) const {
    vf x[VISIT / W];
    float* const flat = (float*)x;  // by tokens: one stream after the other
    for (int j = 0; j < S; j++) {
      const half* from = scale + row[j];
      prefetch(scale + next_row[j]);
      if (U % W == 0) for (int t = 0; t < U; t += W) x[(j * U + t) / W] = load(from + t);
      else for (int t = 0; t < U; t++) flat[j * U + t] = to_float(from[t]);
    }
    if (__builtin_expect(valid < VISIT, 0)) std::fill(flat + valid, flat + VISIT, 0.f);  // where no token is may be NaN
    for (int s = 1; s < S; s *= 2) riffle<1>(x);
    memcpy(out, x, sizeof x);
  }
};
