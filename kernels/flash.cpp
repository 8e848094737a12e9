// The top rung: attention of one new token per sequence over a paged KV cache, at the memory's speed.
// * Work is cut into spans of tokens, of long and short sequences alike, shared out among the threads as they come free;
//   each span leaves (o, m, l), and a merge weighs the spans of a sequence (flash decoding).
// * Every K and V row is read once for all query heads that share it (GQA). Two passes a span: K, then V.
// * Memory is read in several streams at once, each in strict order, each asked for one tile ahead (streams.h).
// MHA 45 GB/s (0.84 to 0.90 of the streaming read), GQA 42 (0.77 to 0.81): 2.1 and 4.8 x the rung below. Steps on the way:
// rows shared by the group, spans, one stream read 4 rows at a time by columns, prefetched: 0.84 / 0.68. Four streams, each
// in strict order: 0.87 / 0.74. Weights in the same pass as scores and spans of up to 1,024 tokens: 3 % each on GQA.
// 2 longer spans a thread and short ones at the end instead of 4 equal ones: nothing on 2 cores, 3 to 10 % on the 16 of an
// H200's host, where MHA then reads 0.90 to 0.93 and GQA 0.81 to 0.84 of the streaming read. The weights of 64 rows at once,
// not row by row, and lines asked for evenly meanwhile: 2 % on fp16. int8, whose V stays in bytes (values.h), gave GQA 1.55 x
// the tokens of fp16 before these, on 2 cores of a Xeon, and 1.75 x since. Without gain: prefetching a line
// of later pages for the TLB, a second prefetch nearby (into L2 either), reading whole rows of V for two heads at a time,
// lengths that fall with what is left (odd remainders cost more than they even out).
#include "values.h"

// ---- One span of one sequence, all heads ----
static void attend(const AttentionArgs& a, const Span& span, const Query* q, const float* unit, Softmax* soft, float* w,
                   Partial* out) {
  const int visits = (span.tokens + VISIT - 1) / VISIT;
  for (int i = 0; i < a.kv_heads * CHUNKS; i++) {
    std::fill(std::begin(soft[i].m), std::end(soft[i].m), -1e30f);  // not infinity: that, less itself, is no number
    std::fill(std::begin(soft[i].l), std::end(soft[i].l), 0.f);
    soft[i].w = w + (size_t)i * visits * ROOM;
  }
  for (int h = 0; INT8 && h < a.kv_heads; h++)
    for_chunks([&](auto n, int c) {
      constexpr int R = Heads<n>::A * Heads<n>::Q, last = n - 1;  // lanes of a head; more lanes than heads need: the last's
      for (int l = 0; l < Heads<n>::LANES; l++) soft[h * CHUNKS + c].unit[l] = unit[h * G + c * MOST + std::min(l / R, last)];
    });
  for (int i = 0; i < visits; i++)
    for (int h = 0; h < a.kv_heads; h++) {
      Streams k(a, a.k_cache, a.v_cache, span, i * VISIT, h);
      if (INT8) k.load_scales(a);
      for_chunks([&](auto n, int c) {
        Softmax& s = soft[h * CHUNKS + c];
        scores<n>(q + (h * G + c * MOST) * D, k, s, s.w + i * ROOM);
      });
    }
  for (int h = 0; h < a.kv_heads; h++)
    for_chunks([&](auto n, int c) {
      constexpr int R = Heads<n>::A * Heads<n>::Q;
      for (int g = 0; g < n; g++) {
        const Softmax& s = soft[h * CHUNKS + c];
        out[h * G + c * MOST + g] = Partial{{}, s.m[g * R], std::accumulate(s.l + g * R, s.l + (g + 1) * R, 0.f)};
      }
    });
  for (int i = 0; i < visits; i++)
    for (int h = 0; h < a.kv_heads; h++) {
      Streams v(a, a.v_cache, a.v_cache, span, i * VISIT, h);
      for_chunks([&](auto n, int c) {
        values<n>(soft[h * CHUNKS + c].w + i * ROOM, v, out + h * G + c * MOST);
      });
    }
  for (int h = 0; BYTES && h < a.q_heads; h++) in_order(out[h]);
}

// ---- All sequences ----
static void merge(const Partial* parts, int count, int q_heads, T* out) {  // the spans of one sequence and one head
  vf o[D / W] = {};
  float m = -INFINITY, l = 0;
  for (int i = 0; i < count; i++) m = std::max(m, parts[i * q_heads].m);
  for (int i = 0; i < count; i++) {
    const Partial& p = parts[i * q_heads];
    const float w = std::exp2(p.m - m);
    l += w * p.l;
    for (int d = 0; d < D / W; d++) o[d] += w * load(p.o + d * W);
  }
  for (int d = 0; d < D / W; d++) store(out + d * W, count ? o[d] / l : vf{});  // an empty sequence gives zeros
}

static void attention(const AttentionArgs& a) {
  static thread_local std::vector<Span> spans;  // buffers are kept: fresh pages would cost more than the merge
  static thread_local std::vector<int> first;
  static thread_local std::vector<Partial> buffer;
  const int64_t tokens = std::accumulate(a.seq_lens, a.seq_lens + a.batch, int64_t(0));
  // 2 spans a thread for three quarters of all tokens, then quarters of them, which let the threads end together
  const auto blocks = [](int64_t n) { return (int)((n + BS - 1) / BS * BS); };
  const int length = blocks(std::min<int64_t>(1024, std::max<int64_t>(64, tokens / (2 * a.num_threads))));
  const int tail = std::min(length, blocks(std::max(VISIT, length / 4)));
  const int visits = (length + VISIT - 1) / VISIT;
  int64_t done = 0;
  spans.clear();
  first.assign(1, 0);
  for (int b = 0; b < a.batch; b++) {
    for (int t = 0; t < a.seq_lens[b]; t += spans.back().tokens, done += spans.back().tokens)
      spans.push_back({b, t, std::min(done < tokens * 3 / 4 ? length : tail, a.seq_lens[b] - t)});
    first.push_back(spans.size());
  }
  buffer.resize(std::max(buffer.size(), spans.size() * a.q_heads));
  Partial* const parts = buffer.data();
  const Span* const work = spans.data();
  const int *const begin = first.data(), count = spans.size(), chunks = a.kv_heads * CHUNKS;
#pragma omp parallel num_threads(a.num_threads)
  {
    static thread_local std::vector<Softmax> scratch;  // of this thread, on cache lines
    const size_t floats = (size_t)a.q_heads * (D + 1) + (size_t)chunks * visits * ROOM;
    scratch.resize(std::max(scratch.size(), chunks + floats * sizeof(float) / sizeof(Softmax) + 1));
    float *const w = (float*)(scratch.data() + chunks), *const unit = w + (size_t)chunks * visits * ROOM;
    Query* const q = (Query*)(unit + a.q_heads);
#pragma omp for schedule(dynamic)
    for (int i = 0; i < count; i++) {
      const Span& span = work[i];
      if (span.start + span.tokens == a.seq_lens[span.seq]) append(a, span.seq);  // no other span reads that row
      for (int h = 0; h < a.q_heads; h++)  // powers of two are cheaper than powers of e
        unit[h] = set_query(query(a, span.seq, h), a.scale * 1.44269504f, q + h * D);
      attend(a, span, q, unit, scratch.data(), w, parts + (size_t)i * a.q_heads);
    }
#pragma omp for
    for (int j = 0; j < a.batch * a.q_heads; j++) {
      const int b = j / a.q_heads, h = j % a.q_heads;
      merge(parts + (size_t)begin[b] * a.q_heads + h, begin[b + 1] - begin[b], a.q_heads, (T*)a.out + (size_t)j * D);
    }
  }
}
