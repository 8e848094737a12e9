// Rung 2: the scalar kernel, with the pairs of a sequence and a query head shared out among threads.
// MHA 5.8 GB/s, GQA 1.8: 1.8 to 2.0 x the rung below, on 2 threads. One long sequence has as many tasks as query heads, so
// it gains as well; a model of few heads on many cores would not.
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
#pragma omp parallel num_threads(a.num_threads)
  {
    std::vector<float> weights;  // each thread has its own
#pragma omp for
    for (int b = 0; b < a.batch; b++) append(a, b);  // all are stored before any is read: the loop ends in a barrier
#pragma omp for collapse(2) schedule(dynamic)
    for (int b = 0; b < a.batch; b++)
      for (int h = 0; h < a.q_heads; h++) attend(a, b, h, weights);
  }
}
