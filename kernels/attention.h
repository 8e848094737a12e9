// What every rung shares: the arguments (one plain struct, filled by ctypes or carried by a CUDA host node), the number
// formats of this build, where a token's row lies, and how a new token's K and V are stored.
// Compiled once for each shape: -DHEAD_DIM= -DGROUP= -DBLOCK_SIZE= -DDTYPE_FLOAT16 (or _FLOAT32, _BFLOAT16), -DKV_INT8.
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <numeric>
#include <thread>
#include <type_traits>
#include <vector>
#include "vectors.h"

struct AttentionArgs {
  const void *q, *k_new, *v_new;   // [batch, q_heads, HEAD_DIM]; [batch, kv_heads, HEAD_DIM] or null: appended first
  void *k_cache, *v_cache;         // one layer: [num_blocks, kv_heads, BLOCK_SIZE, HEAD_DIM]
  void *k_scale, *v_scale;         // int8 only, fp16: [num_blocks, kv_heads, BLOCK_SIZE]
  const int32_t* block_table;      // [batch, table_width]
  const int32_t* seq_lens;         // [batch], the new token included; 0 gives zeros
  void* out;                       // [batch, q_heads, HEAD_DIM]
  int32_t batch, q_heads, kv_heads, table_width, num_threads;
  int32_t q_stride, new_stride;    // from one sequence's q to the next one's, and k_new or v_new, in numbers
  float scale;                     // of the scores, 1 / sqrt(head_dim)
  double start_s, end_s;           // when the kernel ran, by the monotonic clock: written by it
};

#if defined(DTYPE_FLOAT16)
using T = half;
#elif defined(DTYPE_BFLOAT16)
using T = bf16;
#else
using T = float;
#endif
#ifdef KV_INT8
using KV = int8_t;
#else
using KV = T;
#endif
constexpr bool INT8 = std::is_same<KV, int8_t>::value;
constexpr int D = HEAD_DIM, G = GROUP, BS = BLOCK_SIZE;

// The number of the cache row that holds token t of sequence b for a KV head; times D, the offset of its first number.
static inline size_t row_of(const AttentionArgs& a, int b, int head, int t) {
  return ((size_t)a.block_table[(size_t)b * a.table_width + t / BS] * a.kv_heads + head) * BS + t % BS;
}
static inline void store_row(const T* x, T* row, half*) { memcpy(row, x, D * sizeof(T)); }
// int8: one scale for each token and head, so that a new token never changes an older one's numbers.
static inline void store_row(const T* x, int8_t* row, half* scale) {
  vf most = {};
  for (int d = 0; d < D; d += W) most = max(magnitude(load(x + d)), most);
  from_float(max(most) / 127, scale);
  const float s = to_float(*scale);  // as rounded: what the reader will multiply with
  for (int d = 0; d < D; d += W) store_rounded(row + d, s > 0 ? max(min(load(x + d) / s, vf{} + 127.f), vf{} - 127.f) : vf{});
}
static inline const T* query(const AttentionArgs& a, int b, int head) { return (const T*)a.q + (size_t)b * a.q_stride + head * D; }
// Stores the new token's K and V at position seq_len - 1 of sequence b.
static inline void append(const AttentionArgs& a, int b) {
  if (!a.k_new || !a.seq_lens[b]) return;
  for (int h = 0; h < a.kv_heads; h++) {
    const size_t row = row_of(a, b, h, a.seq_lens[b] - 1), source = (size_t)b * a.new_stride + h * D;
    store_row((const T*)a.k_new + source, (KV*)a.k_cache + row * D, (half*)a.k_scale + row);
    store_row((const T*)a.v_new + source, (KV*)a.v_cache + row * D, (half*)a.v_scale + row);
  }
}

// Calls for one host node, which may start before the GPU is as far: call i reads its q, k, v once the GPU has set ready[i],
// and the GPU reads its output once done[i] is set. Who has waited for a word clears it: a CUDA graph does all of it again.
struct Calls {
  AttentionArgs* const* args;  // [count]
  int32_t *ready, *done;       // [count], in pinned memory
  int32_t count, stop;         // stop: give up on those that are not ready, since the GPU has failed
};

static void attention(const AttentionArgs& a);  // each rung's own
static double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

extern "C" {
void neo_attention(void* args) noexcept {
  AttentionArgs& a = *(AttentionArgs*)args;
  a.start_s = now_s();
  attention(a);
  a.end_s = now_s();
}
void neo_calls(void* calls) noexcept {
  Calls& c = *(Calls*)calls;
  for (int32_t i = 0; i < c.count; i++) {
    for (int turns = 0; !__atomic_load_n(&c.ready[i], __ATOMIC_ACQUIRE);) {
      if (__atomic_load_n(&c.stop, __ATOMIC_RELAXED)) return;
      if (turns < 20000) turns++, relax();  // up to a millisecond
      else std::this_thread::yield();       // from then on others may have the core
    }
    c.ready[i] = 0;
    neo_attention(c.args[i]);
    __atomic_store_n(&c.done[i], 1, __ATOMIC_RELEASE);
  }
}
int neo_args_size() { return sizeof(AttentionArgs); }
const char* neo_isa() { return ISA; }
// Cheap enough for every call: 0, or the first sequence that is wrong: b + 1 for its length, -(b + 1) for a block number.
int neo_check(const void* args, int64_t num_blocks) {
  const AttentionArgs& a = *(const AttentionArgs*)args;
  for (int b = 0; b < a.batch; b++) {
    const int64_t len = a.seq_lens[b];
    if (len < 0 || len > (int64_t)a.table_width * BS) return b + 1;
    for (int i = 0; i * (int64_t)BS < len; i++) {
      const int32_t block = a.block_table[(size_t)b * a.table_width + i];
      if (block < 0 || block >= num_blocks) return -(b + 1);
    }
  }
  return 0;
}
}
