// write_kv, gather_tokens and paged_attention on odd shapes against loops in double.
#include "paged_case.h"

namespace kvreclaim::tests {
namespace {

void check_row(const Layout& at, const Sequence& seq, int64_t row, int64_t head, int64_t query) {
  const AttentionArgs& a = at.args;
  const CacheView& c = at.cache.view;
  const int64_t kv_head = head / (a.num_heads / c.heads);
  const std::vector<double> weights = weights_of(a, at.cache, seq, at.q, row, head, query);
  std::vector<double> sum(c.v_dim, 0.0);
  double weight = a.sinks ? std::exp((double)a.sinks[head]) : 0.0;
  for (int64_t slot = 0; slot <= query; ++slot) {
    if (weights[slot] == 0) continue;
    const int64_t block = seq.blocks[slot / c.block_size], s = slot % c.block_size;
    weight += weights[slot];
    for (int64_t d = 0; d < c.v_dim; ++d)
      sum[d] += weights[slot] * at.cache.value(a.layer, block, kv_head, s, d);
  }
  for (int64_t d = 0; d < c.v_dim; ++d) {
    const double want = weight == 0 ? 0 : sum[d] / weight;
    const double got = at.out.get((row * a.num_heads + head) * c.v_dim + d);
    const double tolerance = at.out.type() == Type::kF32 ? 2e-5 : 1e-3 + std::fabs(want) / 128;
    KVR_CHECK(std::fabs(got - want) <= tolerance, "row %ld head %ld dim %ld: %g, not %g", (long)row, (long)head,
              (long)d, got, want);
  }
}

void run(const Case& test) {
  Layout at(test);
  kernels().paged_attention(at.args);
  for (const Sequence& seq : at.sequences)
    for (int64_t i = 0; i < seq.view.query_len; ++i)
      for (int64_t h = 0; h < at.args.num_heads; ++h)
        check_row(at, seq, seq.view.first_row + i, h, seq.view.seq_len - seq.view.query_len + i);
}

KVR_TEST(attention_shapes) {
  for (Type type : {Type::kF32, Type::kBF16})
    for (auto [k_dim, v_dim] : {std::pair<int64_t, int64_t>{8, 8}, {32, 64}, {80, 40}, {128, 128}, {96, 24}})
      for (int64_t group : {1, 3, 4, 7})
        run({type, 2, group, 16, k_dim, v_dim, {{1, 1}, {0, 0}, {1, 17}, {1, 64}, {5, 33}, {20, 40}}});
}

KVR_TEST(attention_splits) {
  for (Type type : {Type::kF32, Type::kBF16})
    run({type, 1, 2, 48, 16, 16, {{1, 511}, {1, 512}, {1, 513}, {2, 1100}, {40, 600}}});
}

KVR_TEST(attention_options) {
  for (Type type : {Type::kF32, Type::kBF16})
    for (int64_t window : {0, 1, 40}) {
      run({type, 2, 2, 16, 16, 16, {{1, 100}, {9, 30}, {1, 600}}, 2.0f, window, true, false});
      run({type, 2, 2, 16, 16, 16, {{1, 100}, {9, 30}, {1, 600}}, 0.0f, window, false, true});
    }
}

// Queries of 16 bits over codes are multiplied as integers, or over fp8 as bf16, where the CPU can, unless dims are odd.
KVR_TEST(attention_of_integers) {
  for (Formats format : kCoded)
    for (Type type : {Type::kF32, Type::kBF16, Type::kF16})
      for (auto [k_dim, v_dim] : {std::pair<int64_t, int64_t>{64, 96}, {24, 8}})
        for (int64_t group : {1, 2, 3, 4, 9})
          run({type, 2, group, 16, k_dim, v_dim, {{1, 1}, {0, 0}, {1, 70}, {3, 20}}, 0, 0, false, false, format});
}

KVR_TEST(attention_formats) {
  for (Formats format : kCacheFormats) {
    run({Type::kF32, 2, 3, 32, 24, 40, {{1, 1}, {0, 0}, {1, 70}, {3, 20}}, 0, 0, false, false, format});
    run({Type::kF16, 1, 9, 16, 40, 8, {{1, 17}}, 0, 0, false, false, format});
  }
}

KVR_TEST(attention_formats_splits_and_options) {
  for (Formats format : kCoded)
    for (Type type : {Type::kF32, Type::kBF16}) {
      run({type, 1, 1, 48, 32, 32, {{1, 511}, {1, 512}, {1, 513}}, 0, 0, false, false, format});
      for (bool positions : {false, true})
        run({type, 1, 2, 16, 32, 32, {{1, 100}, {5, 30}, {1, 150}}, 2.0f, 40, true, positions, format});
    }
  for (Formats format : kCacheFormats)
    if (format.k >= Format::kBF16 && format.k != Format::kF16)
      run({Type::kBF16, 2, 1, 16, 32, 32, {{1, 2100}, {1, 8250}}, 0, 0, false, false, format});
}

KVR_TEST(attention_latent) {
  for (Formats format : kCacheFormats)
    run({Type::kF32, 1, 5, 16, 8, 40, {{1, 33}, {2, 17}}, 0, 0, false, false, format, true});
  run({Type::kBF16, 1, 70, 16, 8, 80, {{1, 600}, {2, 17}}, 0, 0, false, false, Format::kInt8, true});
}

KVR_TEST(write_rounds_and_takes_any_strides) {
  Random random(1);
  TestCache cache(Type::kBF16, 1, 2, 3, 16, 8, 8);
  Numbers x(Type::kF32, 5 * 3 * 8 * 2);
  x.randomise(random);
  const RowsView view{x.data(), 3 * 8 * 2, 8 * 2, 2, Type::kF32};
  const std::vector<int64_t> slots{31, 0, 7, 16, 2};
  kernels().write_kv({cache.view, 0, view, view, slots.data(), 5});
  for (int64_t t = 0; t < 5; ++t)
    for (int64_t h = 0; h < 3; ++h)
      for (int64_t d = 0; d < 8; ++d) {
        const float want = widen(round_bf16(x.get((t * 3 + h) * 16 + 2 * d)));
        const int64_t block = slots[t] / 16, s = slots[t] % 16;
        KVR_CHECK(cache.k.get(cache.k_index(0, block, h, s, d)) == want, "key %ld %ld %ld", (long)t, (long)h, (long)d);
        KVR_CHECK(cache.v.get(cache.v_index(0, block, h, s, d)) == want, "value %ld %ld %ld", (long)t, (long)h,
                  (long)d);
      }
}

}  // namespace
}  // namespace kvreclaim::tests
