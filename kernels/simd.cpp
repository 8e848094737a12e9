// Rung 3: the same loops in vectors of W floats, from simd.h: the dot products and the sums of V work on 16, 8 or 4
// numbers at once, and fp16 is converted by the hardware.
// MHA 21 GB/s, GQA 8.6: 3.6 and 4.8 x the rung below. What is left: every head goes through all blocks by itself, so that
// memory is read in pieces of 4 KiB, nothing is asked for in time, and GQA still converts each row 4 times.
#include "attention.h"

static void attend(const AttentionArgs& a, int b, int q_head, std::vector<float>& weights) {
  const int len = a.seq_lens[b], kv_head = q_head / G, padded = (len + W - 1) / W * W;
  const size_t at = ((size_t)b * a.q_heads + q_head) * D;  // of this head's output
  const T* q = query(a, b, q_head);
  weights.assign(padded, -INFINITY);  // what pads the last vector weighs nothing
  for (int t = 0; t < len; t++) {     // scores, in powers of two
    const size_t row = row_of(a, b, kv_head, t);
    const KV* k = (const KV*)a.k_cache + row * D;
    vf dot = {};
    for (int d = 0; d < D; d += W) dot += load(q + d) * load(k + d);
    weights[t] = sum(dot) * a.scale * 1.44269504f * (INT8 ? to_float(((const half*)a.k_scale)[row]) : 1.f);
  }
  vf most = vf{} - INFINITY, total = {}, o[D / W] = {};
  for (int t = 0; t < padded; t += W) most = max(load(&weights[t]), most);
  const float top = max(most);
  for (int t = 0; t < padded; t += W) {
    const vf e = exp2(load(&weights[t]) - top);
    store(&weights[t], e);
    total += e;
  }
  for (int t = 0; t < len; t++) {  // weighted sum of the values
    const size_t row = row_of(a, b, kv_head, t);
    const KV* v = (const KV*)a.v_cache + row * D;
    const float w = weights[t] * (INT8 ? to_float(((const half*)a.v_scale)[row]) : 1.f);
    for (int d = 0; d < D / W; d++) o[d] += w * load(v + d * W);
  }
  for (int d = 0; d < D; d++) from_float(len ? o[d / W][d % W] / sum(total) : 0.f, (T*)a.out + at + d);
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
