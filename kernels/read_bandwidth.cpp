// How fast this machine's memory can be read at all: the roofline of every kernel here. Each thread adds up its part of a
// buffer, in several streams at once and with a prefetch some way ahead; the bench tries many of both and keeps the best.
#include <chrono>
#include <cstddef>
#include <cstdint>

typedef uint64_t line __attribute__((vector_size(64)));  // a cache line, in whatever registers there are

template <int STREAMS, int LEVEL> static uint64_t add_up(const char* p, size_t n, size_t ahead) {
  const size_t part = n / STREAMS / 256 * 256;
  line total[STREAMS][2] = {};
  for (size_t i = 0; i < part; i += 256) {
#pragma GCC unroll 8
    for (int s = 0; s < STREAMS; s++) {
      const char* q = p + s * part + i;
#pragma GCC unroll 4
      for (int c = 0; c < 256; c += 64) {
        if (LEVEL == 1) __builtin_prefetch(q + ahead + c, 0, 3);  // to L1
        if (LEVEL == 2) __builtin_prefetch(q + ahead + c, 0, 2);  // to L2
        if (LEVEL == 3) __builtin_prefetch(q + ahead + c, 0, 0);  // past the caches
        total[s][c / 64 % 2] += *(const line*)(q + c);
      }
    }
  }
  uint64_t sum = 0;
  for (auto& pair : total) for (line l : pair) for (int i = 0; i < 8; i++) sum += l[i];
  return sum;
}
template <int STREAMS> static uint64_t pick(const char* p, size_t n, int level, size_t ahead) {
  switch (level) {
    case 1: return add_up<STREAMS, 1>(p, n, ahead);
    case 2: return add_up<STREAMS, 2>(p, n, ahead);
    case 3: return add_up<STREAMS, 3>(p, n, ahead);
    default: return add_up<STREAMS, 0>(p, n, ahead);
  }
}

constexpr size_t PIECE = 1 << 20;
// Seconds to read n bytes at p (aligned to 64), a multiple of PIECE, once; the sum goes out so that no compiler can leave the reading out.
extern "C" double read_bandwidth(const char* p, size_t n, int threads, int streams, int level, size_t ahead, uint64_t* sum) {
  uint64_t total = 0;
  const int pieces = n / PIECE;  // dealt out as threads come free: one slow core must not decide what the memory can do
  const auto start = std::chrono::steady_clock::now();
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(+ : total)
  for (int i = 0; i < pieces; i++) {
    const char* q = p + i * PIECE;
    total += streams >= 8 ? pick<8>(q, PIECE, level, ahead) : streams >= 4 ? pick<4>(q, PIECE, level, ahead)
           : streams >= 2 ? pick<2>(q, PIECE, level, ahead) : pick<1>(q, PIECE, level, ahead);
  }
  *sum = total;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
