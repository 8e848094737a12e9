// The top rung: attention of one new token per sequence over a paged KV cache, at the memory's speed.
// * Work is cut into spans of a few hundred tokens, of long and short sequences alike, and shared out among the threads
//   as they come free; each span leaves (o, m, l), and a merge weighs the spans of a sequence (flash decoding).
// * Every K and V row is read once, in memory order, for all query heads that share it (GQA), and its place in memory is
//   asked for well before it is needed.
// * Two passes a span, over K and over V: scores stay in the cache, sums of V in registers.
#include "attention.h"

struct alignas(64) Partial { float o[D]; float m, l; };  // not yet normalised output, greatest score, sum of the weights

constexpr int power_of_two(int n, int divides) {  // the greatest one that is at most n and divides `divides`
  int p = 1;
  while (p * 2 <= n && divides % (p * 2) == 0) p *= 2;
  return p;
}

// ---- Asking for memory in time ----
constexpr int LINE = 64 / sizeof(KV);     // numbers in a cache line
constexpr int FAR = 8192 / sizeof(KV);    // how far ahead a line is fetched to L2 ...
constexpr int NEAR = 1024 / sizeof(KV);   // ... and to L1
struct Ahead {  // what lies `FAR` further on in the order of the visits
  const KV *here, *next;  // this block, the next one
  int size;               // of a block, all heads
  const KV* operator()(int offset) const { return offset + FAR < size ? here + offset + FAR : next + (offset + FAR - size); }
};
static inline void prefetch(const KV* near, const KV* far) {
  __builtin_prefetch(near + NEAR, 0, 3);
  __builtin_prefetch(far, 0, 2);
}

// ---- One tile: BS rows of one KV head, for N of its query heads ----
template <int N> static inline void scores(const float* q, const KV* tile, int rows, float* s, int stride, const KV* far) {
  constexpr int R = power_of_two(SUMS / N, BS);  // rows at a time: R * N sums. Rows past the end are scored and forgotten
  for (int t = 0; t < rows; t += R, tile += R * D, far += R * D) {
    vf acc[(R * N + W - 1) / W * W] = {};
#pragma GCC unroll 64
    for (int d = 0; d < D; d += W)
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        if ((r * D + d) % LINE == 0) prefetch(tile + r * D + d, far + r * D + d);
        const vf x = load(tile + r * D + d);
#pragma GCC unroll 16
        for (int g = 0; g < N; g++) acc[g * R + r] += x * load(q + g * D + d);
      }
    float dots[sizeof(acc) / sizeof(vf)];
#pragma GCC unroll 16
    for (int i = 0; i < R * N; i += W) store(dots + i, sums(acc + i));
#pragma GCC unroll 16
    for (int g = 0; g < N; g++) memcpy(s + g * stride + t, dots + g * R, R * sizeof(float));
  }
}

template <int N, int C> static inline void values(const float* w, int stride, const KV* tile, int rows, Partial* out, int column, const KV* far) {
  vf o[N][C];
#pragma GCC unroll 16
  for (int g = 0; g < N; g++)
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) o[g][c] = load(out[g].o + column + c * W);
  far += column * BS;
  for (int t = 0; t < rows; t++, far += C * W) {
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) {
      if (c * W % LINE == 0) prefetch(tile + t * D + column + c * W, far + c * W);
      const vf x = load(tile + t * D + column + c * W);
#pragma GCC unroll 16
      for (int g = 0; g < N; g++) o[g][c] += x * w[g * stride + t];
    }
  }
#pragma GCC unroll 16
  for (int g = 0; g < N; g++)
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) store(out[g].o + column + c * W, o[g][c]);
}

// All query heads of the tile's group, a few at a time; all columns, as many at a time as there are registers for.
template <int N = std::min(G, 4)> static inline void tile_scores(const float* q, const KV* tile, int rows, float* s, int stride, const KV* far, int left = G) {
  for (; left >= N; left -= N, q += N * D, s += N * stride) scores<N>(q, tile, rows, s, stride, far);
  if constexpr (G % N != 0) scores<G % N>(q, tile, rows, s, stride, far);
}
template <int N> static inline void columns(const float* w, int stride, const KV* tile, int rows, Partial* out, const KV* far) {
  constexpr int C = std::min(SUMS / N, D / W), REST = D / W % C;
  for (int c = 0; c + C * W <= D; c += C * W) values<N, C>(w, stride, tile, rows, out, c, far);
  if constexpr (REST > 0) values<N, REST>(w, stride, tile, rows, out, D - REST * W, far);
}
template <int N = std::min(G, 4)> static inline void tile_values(const float* w, int stride, const KV* tile, int rows, Partial* out, const KV* far, int left = G) {
  for (; left >= N; left -= N, w += N * stride, out += N) columns<N>(w, stride, tile, rows, out, far);
  if constexpr (G % N != 0) columns<G % N>(w, stride, tile, rows, out, far);
}

// ---- One span of one sequence, all heads ----
struct Span { int seq, start, tokens; };

static void softmax(float* w, int stride, int tokens, Partial* out) {  // scores are in powers of two: see `attention`
  std::fill(w + tokens, w + stride, -INFINITY);
  vf m = vf{} - INFINITY, l = {};
  for (int i = 0; i < stride; i += W) m = max(load(w + i), m);
  out->m = max(m);
  for (int i = 0; i < stride; i += W) {
    const vf e = exp2(load(w + i) - out->m);
    store(w + i, e);
    l += e;
  }
  out->l = sum(l);
}

static void attend(const AttentionArgs& a, const Span& span, const float* q, float* s, int stride, Partial* out) {
  const int32_t* blocks = a.block_table + (size_t)span.seq * a.table_width + span.start / BS;
  const int count = (span.tokens + BS - 1) / BS, size = a.kv_heads * BS * D;
  const KV *K = (const KV*)a.k_cache, *V = (const KV*)a.v_cache;
  for (int i = 0; i < count; i++) {
    const KV* here = K + (size_t)blocks[i] * size;
    const Ahead ahead{here, i + 1 < count ? K + (size_t)blocks[i + 1] * size : V + (size_t)blocks[0] * size, size};
    const int rows = std::min(BS, span.tokens - i * BS);
    for (int h = 0; h < a.kv_heads; h++) {
      float* tile_s = s + h * G * stride + i * BS;
      tile_scores(q + h * G * D, here + h * BS * D, rows, tile_s, stride, ahead(h * BS * D));
      if constexpr (INT8) {
        const half* scale = (const half*)a.k_scale + ((size_t)blocks[i] * a.kv_heads + h) * BS;
        for (int t = 0; t < rows; t++) for (int g = 0; g < G; g++) tile_s[g * stride + t] *= to_float(scale[t]);
      }
    }
  }
  for (int h = 0; h < a.q_heads; h++) {
    out[h] = {};
    softmax(s + h * stride, stride, span.tokens, out + h);
  }
  for (int i = 0; i < count; i++) {
    const KV* here = V + (size_t)blocks[i] * size;
    const Ahead ahead{here, V + (size_t)blocks[std::min(i + 1, count - 1)] * size, size};
    const int rows = std::min(BS, span.tokens - i * BS);
    for (int h = 0; h < a.kv_heads; h++) {
      float* tile_s = s + h * G * stride + i * BS;
      if constexpr (INT8) {
        const half* scale = (const half*)a.v_scale + ((size_t)blocks[i] * a.kv_heads + h) * BS;
        for (int t = 0; t < rows; t++) for (int g = 0; g < G; g++) tile_s[g * stride + t] *= to_float(scale[t]);
      }
      tile_values(tile_s, stride, here + h * BS * D, rows, out + h * G, ahead(h * BS * D));
    }
  }
}

// ---- All sequences ----
static void merge(const Partial* parts, int count, int q_heads, T* out) {  // the spans of one sequence and one head
  float m = -INFINITY, l = 0, o[D] = {};
  for (int i = 0; i < count; i++) m = std::max(m, parts[i * q_heads].m);
  for (int i = 0; i < count; i++) {
    const Partial& p = parts[i * q_heads];
    const float w = std::exp2(p.m - m);
    l += w * p.l;
    for (int d = 0; d < D; d++) o[d] += w * p.o[d];
  }
  for (int d = 0; d < D; d++) from_float(count ? o[d] / l : 0.f, out + d);  // an empty sequence gives zeros
}

static void attention(const AttentionArgs& a) {
  static thread_local std::vector<Span> spans;  // buffers are kept: fresh pages would cost more than the merge
  static thread_local std::vector<int> first;
  static thread_local std::vector<Partial> buffer;
  const int64_t tokens = [&] { int64_t n = 0; for (int b = 0; b < a.batch; b++) n += a.seq_lens[b]; return n; }();
  const int aim = std::min<int64_t>(512, std::max<int64_t>(64, tokens / (4 * a.num_threads)));
  const int length = (aim + BS - 1) / BS * BS, stride = (length + W - 1) / W * W;  // whole blocks; whole vectors
  spans.clear();
  first.assign(1, 0);
  for (int b = 0; b < a.batch; b++) {
    for (int t = 0; t < a.seq_lens[b]; t += length) spans.push_back({b, t, std::min(length, a.seq_lens[b] - t)});
    first.push_back(spans.size());
  }
  buffer.resize(std::max(buffer.size(), spans.size() * a.q_heads));
  Partial* const parts = buffer.data();
  const Span* const work = spans.data();
  const int *const begin = first.data(), count = spans.size();
#pragma omp parallel num_threads(a.num_threads)
  {
    static thread_local std::vector<Partial> scratch;  // of this thread: queries and scores, on cache lines
    const size_t needed = (size_t)a.q_heads * (D + stride) * sizeof(float) / sizeof(Partial) + 1;
    if (scratch.size() < needed) scratch.resize(needed);
    float *q = (float*)scratch.data(), *s = q + a.q_heads * D;
#pragma omp for schedule(dynamic)
    for (int i = 0; i < count; i++) {
      const Span& span = work[i];
      if (span.start + span.tokens == a.seq_lens[span.seq]) append(a, span.seq);  // no other span reads that row
      for (int j = 0; j < a.q_heads * D; j += W)  // powers of two are cheaper than powers of e
        store(q + j, load((const T*)a.q + (size_t)span.seq * a.q_heads * D + j) * (a.scale * 1.44269504f));
      attend(a, span, q, s, stride, parts + (size_t)i * a.q_heads);
    }
#pragma omp for
    for (int j = 0; j < a.batch * a.q_heads; j++) {
      const int b = j / a.q_heads, h = j % a.q_heads;
      merge(parts + (size_t)begin[b] * a.q_heads + h, begin[b + 1] - begin[b], a.q_heads, (T*)a.out + (size_t)j * D);
    }
  }
}
