// column_sums on odd shapes against loops in double.
#include "paged_case.h"

namespace kvreclaim::tests {
namespace {

// [K][columns] of one sequence, by the definition.
std::vector<double> expected_sums(const Layout& at, const Sequence& seq, int64_t columns) {
  const AttentionArgs& a = at.args;
  const int64_t group = a.num_heads / a.cache.heads;
  std::vector<double> sums(a.cache.heads * columns, 0.0);
  for (int64_t i = 0; i < seq.view.query_len; ++i)
    for (int64_t h = 0; h < a.num_heads; ++h) {
      const int64_t query = seq.view.seq_len - seq.view.query_len + i;
      const std::vector<double> weights = weights_of(a, at.cache, seq, at.q, seq.view.first_row + i, h, query);
      double whole = a.sinks ? std::exp((double)a.sinks[h]) : 0.0;
      for (double weight : weights) whole += weight;
      for (int64_t slot = 0; slot <= query && whole > 0; ++slot)
        sums[h / group * columns + slot] += weights[slot] / whole;
    }
  return sums;
}

void run(const Case& test) {
  Layout at(test);
  int64_t columns = 0;
  for (const Sequence& seq : at.sequences) columns = std::max(columns, seq.view.seq_len);
  std::vector<float> sums(at.sequences.size() * test.heads * columns, std::numeric_limits<float>::quiet_NaN());
  kernels().column_sums({at.args, sums.data(), columns});
  const float* got = sums.data();
  for (const Sequence& seq : at.sequences)
    for (double want : expected_sums(at, seq, columns)) {
      KVR_CHECK(std::fabs(*got - want) <= 1e-5 * (1 + want), "column %ld: %g, not %g",
                (long)((got - sums.data()) % columns), *got, want);
      ++got;
    }
}

KVR_TEST(column_sums_shapes) {
  for (Type type : {Type::kF32, Type::kBF16})
    for (auto [k_dim, v_dim] : {std::pair<int64_t, int64_t>{8, 8}, {32, 64}, {80, 40}, {128, 128}})
      for (int64_t group : {1, 3, 4, 7, 8, 17})
        run({type, 2, group, 16, k_dim, v_dim, {{1, 1}, {0, 0}, {1, 17}, {1, 64}, {5, 33}, {20, 40}, {0, 9}}});
}

KVR_TEST(column_sums_lengths) {
  for (Type type : {Type::kF32, Type::kBF16})
    run({type, 1, 2, 48, 16, 16, {{1, 511}, {1, 512}, {1, 513}, {2, 1100}, {40, 600}, {64, 64}}});
}

KVR_TEST(column_sums_options) {
  for (Type type : {Type::kF32, Type::kBF16})
    for (int64_t window : {0, 1, 40}) {
      run({type, 2, 2, 16, 16, 16, {{1, 100}, {9, 30}, {1, 600}}, 2.0f, window, true, false});
      run({type, 2, 2, 16, 16, 16, {{1, 100}, {9, 30}, {1, 600}}, 0.0f, window, false, true});
      run({type, 2, 3, 16, 16, 16, {{1, 100}, {90, 130}, {1, 600}}, 2.0f, window, true, true});
    }
}

KVR_TEST(column_sums_formats) {
  for (Formats format : kCacheFormats)
    for (bool latent : {false, true})
      run({Type::kF32, 1, 3, 16, 24, 40, {{1, 17}, {3, 70}}, 0, 0, true, false, format, latent});
}

KVR_TEST(column_sums_of_nothing) {
  run({Type::kF32, 2, 2, 16, 16, 16, {{0, 3}}});
}

}  // namespace
}  // namespace kvreclaim::tests
