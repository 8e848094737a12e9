// Rung 1: attention of one new token per sequence over a paged KV cache, as a textbook would write it, on one thread.
// GB/s of KV read here and in the other rungs' notes: fp16, 16 sequences of 1,000 tokens, 2 cores of Zen 5 (AVX-512) whose
// memory streams 52-55 GB/s; MHA is Llama-2-7B's shape, GQA Llama-3.1-8B's (4 query heads share a KV head).
// MHA 3.3, GQA 0.9: a multiplication at a time, and GQA reads (from the cache) and converts each row 4 times.
#include "attention.h"

static void attend(const AttentionArgs& a, int b, int q_head, std::vector<float>& weights) {
  const int len = a.seq_lens[b], kv_head = q_head / G;
  const size_t at = ((size_t)b * a.q_heads + q_head) * D;  // of this head's output
  const T* q = query(a, b, q_head);
  weights.resize(len);
  float most = -INFINITY, total = 0, o[D] = {};
  for (int t = 0; t < len; t++) {  // scores
    const size_t row = row_of(a, b, kv_head, t);
    float dot = 0;
    for (int d = 0; d < D; d++) dot += to_float(q[d]) * to_float(((const KV*)a.k_cache)[row * D + d]);
    if (INT8) dot *= to_float(((const half*)a.k_scale)[row]);
    weights[t] = dot * a.scale;
    most = std::max(most, weights[t]);
  }
  for (float& w : weights) total += w = std::exp(w - most);  // softmax
  for (int t = 0; t < len; t++) {                             // weighted sum of the values
    const size_t row = row_of(a, b, kv_head, t);
    const float w = weights[t] * (INT8 ? to_float(((const half*)a.v_scale)[row]) : 1.f);
    for (int d = 0; d < D; d++) o[d] += w * to_float(((const KV*)a.v_cache)[row * D + d]);
  }
  for (int d = 0; d < D; d++) from_float(len ? o[d] / total : 0.f, (T*)a.out + at + d);
}

static void attention(const AttentionArgs& a) {
  std::vector<float> weights;
  for (int b = 0; b < a.batch; b++) {
    append(a, b);
    for (int h = 0; h < a.q_heads; h++) attend(a, b, h, weights);
  }
}
