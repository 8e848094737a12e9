// A rung on its own, without Python: for sanitizers, and for processors that only an emulator has here.
// c++ -O2 -fopenmp -DRUNG='"../flash.cpp"' -DHEAD_DIM=... (as in attention.h) driver.cpp; exits with 1 where an error is
// larger than its format allows. Unused slots of the caches hold NaN.
#include RUNG
#include <cstdio>
#include <random>

static std::mt19937 rng(1);
static float gauss() { return std::normal_distribution<float>()(rng); }

struct Case {
  std::vector<int32_t> lens, table;
  std::vector<T> qkv, out;  // q, k and v of a sequence side by side, as the fused projection gives them
  std::vector<KV> k, v;
  std::vector<half> k_scale, v_scale;
  AttentionArgs a{};

  Case(std::vector<int32_t> lengths, int kv_heads, int threads, float size) : lens(lengths) {
    int width = 1;
    for (int n : lens) width = std::max(width, (n + BS - 1) / BS);
    const int batch = lens.size(), blocks = batch * width + 1, row_size = kv_heads * (G + 2) * D;
    table.resize(blocks);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), rng);
    qkv.resize(batch * row_size), out.resize(batch * kv_heads * G * D);
    k.resize((size_t)blocks * kv_heads * BS * D), v.resize(k.size());
    if (INT8) k_scale.resize(k.size() / D), v_scale.resize(k_scale.size());
    memset((void*)k.data(), 255, k.size() * sizeof(KV)), memset((void*)v.data(), 255, v.size() * sizeof(KV));  // NaN
    for (auto* s : {&k_scale, &v_scale}) for (half& x : *s) x.bits = 0xffff;
    for (auto& x : qkv) from_float(gauss() * size, &x);
    a = {qkv.data(), nullptr, nullptr, k.data(), v.data(), k_scale.data(), v_scale.data(), table.data(), lens.data(), out.data(),
         batch, kv_heads * G, kv_heads, width, threads, row_size, row_size, 1 / std::sqrt((float)D), 0, 0};
    T *const k_new = qkv.data() + kv_heads * G * D, *const v_new = k_new + kv_heads * D;
    T x[D];
    for (int b = 0; b < batch; b++)
      for (int h = 0; h < kv_heads; h++)
        for (int t = 0; t < lens[b]; t++)
          for (bool is_k : {true, false}) {
            for (T& d : x) from_float(gauss() * size, &d);
            const size_t row = row_of(a, b, h, t);
            if (t == lens[b] - 1) memcpy((is_k ? k_new : v_new) + (size_t)b * row_size + h * D, x, sizeof x);  // by the rung
            else if (is_k) store_row(x, &k[row * D], k_scale.data() + (INT8 ? row : 0));
            else store_row(x, &v[row * D], v_scale.data() + (INT8 ? row : 0));
          }
    a.k_new = k_new, a.v_new = v_new;
  }

  double number(const std::vector<KV>& cache, const std::vector<half>& scale, size_t row, int d) const {
    return to_float(cache[row * D + d]) * (INT8 ? (double)to_float(scale[row]) : 1.0);
  }
  // Greatest error of an output beyond its own rounding, as a share of the greatest output.
  double error() const {
    const double unit = sizeof(T) == 4 ? 0 : std::is_same<T, half>::value ? 1 / 2048.0 : 1 / 256.0;
    double worst = 0, most = 1e-30;
    for (int b = 0; b < a.batch; b++)
      for (int h = 0; h < a.q_heads; h++) {
        std::vector<double> w(lens[b]), o(D);
        double top = -1e300, total = 0;
        for (int t = 0; t < lens[b]; t++, top = std::max(top, w[t - 1]))
          for (int d = 0; d < D; d++) w[t] += to_float(query(a, b, h)[d]) * number(k, k_scale, row_of(a, b, h / G, t), d) * a.scale;
        for (double& x : w) total += x = std::exp(x - top);
        for (int t = 0; t < lens[b]; t++) for (int d = 0; d < D; d++) o[d] += w[t] / total * number(v, v_scale, row_of(a, b, h / G, t), d);
        for (int d = 0; d < D; d++) {
          const double off = std::fabs(to_float(out[((size_t)b * a.q_heads + h) * D + d]) - o[d]) - unit * std::fabs(o[d]);
          worst = off > worst || off != off ? off : worst;
          most = std::max(most, std::fabs(o[d]));
        }
      }
    return worst / most;
  }
};

int main() {
  double worst[2] = {};  // with scores of about 1, and of about 1,000, where float's own rounding of a score weighs more
  const std::vector<std::vector<int32_t>> lengths = {{1}, {0}, {}, {1, 2, 0, BS - 1, BS, BS + 1}, {255, 256, 257, 63, 64, 65}, {1500, 3, 700}};
  for (const auto& lens : lengths)
    for (int threads : {1, 2, 4})
      for (int large : {0, 1}) {
        Case c(lens, 2, threads, large ? 30.f : 1.f);
        if (neo_check(&c.a, c.table.size())) return puts("neo_check rejects good arguments"), 1;
        neo_attention(&c.a);
        const double e = c.error();
        if (e > worst[large] || e != e) worst[large] = e;
      }
  printf("%s head_dim %d group %d block %d: error %.1e, with large scores %.1e\n", ISA, D, G, BS, worst[0], worst[1]);
  // Beside int8, flash rounds q to 16 bits: 1 / 65,534 of its greatest number, which large scores make visible.
  return !(worst[0] < (INT8 ? 1e-4 : sizeof(T) == 4 ? 1e-5 : 2e-4) && worst[1] < (INT8 ? 3e-2 : 2e-3));
}
