// write_kv, gather_tokens and paged_attention on odd shapes against loops in double.
#include "harness.h"

namespace kvreclaim::tests {
namespace {

struct Case {
  Type type;
  int64_t heads, group, block_size, k_dim, v_dim;
  std::vector<std::pair<int64_t, int64_t>> lengths;  // (queries, slots)
  float softcap = 0;
  int64_t window = 0;
  bool sinks = false, masks = false;
};

struct Sequence {
  std::vector<int32_t> blocks;
  std::vector<uint8_t> evicted;
  std::vector<int32_t> positions;
  SequenceView view;
};

// One past the last slot a query sees is its own slot + 1; the rest is as AttentionArgs says.
bool sees(const AttentionArgs& a, const Sequence& seq, int64_t head, int64_t query, int64_t slot) {
  if (slot > query) return false;
  const SequenceView& view = seq.view;
  if (view.evicted.data && slot < view.evicted.slots &&
      view.evicted.data[a.layer * view.evicted.stride_layer + head * view.evicted.stride_head + slot])
    return false;
  int64_t position = slot + view.shift;
  if (view.positions.data && slot < view.positions.slots)
    position = view.positions.data[a.layer * view.positions.stride_layer + head * view.positions.stride_head + slot];
  return a.window == 0 || query + view.shift - position < a.window;
}

void check_row(const AttentionArgs& a, const TestCache& cache, const Sequence& seq, const Numbers& q,
               const Numbers& out, int64_t row, int64_t head, int64_t query) {
  const CacheView& c = cache.view;
  const int64_t kv_head = head / (a.num_heads / c.heads);
  std::vector<double> sum(c.v_dim, 0.0);
  double weight = a.sinks ? std::exp((double)a.sinks[head]) : 0.0;
  for (int64_t slot = 0; slot <= query; ++slot) {
    if (!sees(a, seq, kv_head, query, slot)) continue;
    const int64_t block = seq.blocks[slot / c.block_size], s = slot % c.block_size;
    double score = 0;
    for (int64_t d = 0; d < c.k_dim; ++d)
      score += (double)q.get((row * a.num_heads + head) * c.k_dim + d) *
               cache.k.get(cache.k_index(a.layer, block, kv_head, s, d));
    score *= a.scale;
    if (a.softcap != 0) score = a.softcap * std::tanh(score / a.softcap);
    weight += std::exp(score);
    for (int64_t d = 0; d < c.v_dim; ++d)
      sum[d] += std::exp(score) * cache.v.get(cache.v_index(a.layer, block, kv_head, s, d));
  }
  for (int64_t d = 0; d < c.v_dim; ++d) {
    const double want = weight == 0 ? 0 : sum[d] / weight;
    const double got = out.get((row * a.num_heads + head) * c.v_dim + d);
    const double tolerance = out.type() == Type::kBF16 ? 1e-3 + std::fabs(want) / 128 : 2e-5;
    KVR_CHECK(std::fabs(got - want) <= tolerance, "row %ld head %ld dim %ld: %g, not %g", (long)row, (long)head,
              (long)d, got, want);
  }
}

void fill(TestCache& cache, int64_t layer, const Sequence& seq, Random& random) {
  const CacheView& c = cache.view;
  const int64_t tokens = seq.view.seq_len;
  Numbers k(c.type, tokens * c.heads * c.k_dim), v(c.type, tokens * c.heads * c.v_dim);
  k.randomise(random), v.randomise(random);
  std::vector<int64_t> slots(tokens), ids(seq.blocks.begin(), seq.blocks.end());
  for (int64_t t = 0; t < tokens; ++t)
    slots[t] = seq.blocks[t / c.block_size] * c.block_size + t % c.block_size;
  kernels().write_kv({c, layer, rows_of(k, c.heads, c.k_dim), rows_of(v, c.heads, c.v_dim), slots.data(), tokens});
  Numbers k_back(c.type, k.count()), v_back(c.type, v.count());
  kernels().gather_tokens({c, layer, ids.data(), tokens, k_back.data(), v_back.data()});
  for (int64_t h = 0; h < c.heads; ++h)
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t d = 0; d < c.k_dim; ++d) {
        const float want = k.get((t * c.heads + h) * c.k_dim + d);
        KVR_CHECK(k_back.get((h * tokens + t) * c.k_dim + d) == want, "key %ld", (long)t);
        const int64_t block = seq.blocks[t / c.block_size];
        KVR_CHECK(cache.k.get(cache.k_index(layer, block, h, t % c.block_size, d)) == want, "key %ld", (long)t);
      }
      for (int64_t d = 0; d < c.v_dim; ++d)
        KVR_CHECK(v_back.get((h * tokens + t) * c.v_dim + d) == v.get((t * c.heads + h) * c.v_dim + d), "value %ld",
                  (long)t);
    }
}

void add_masks(Sequence& seq, int64_t heads, Random& random) {
  const int64_t slots = seq.view.seq_len - 1;
  if (slots <= 0) return;
  for (int64_t i = 0; i < 2 * heads * slots; ++i) {
    seq.evicted.push_back(random.below(3) == 0);
    seq.positions.push_back((int32_t)(2 * (i % slots) + random.below(2)));
  }
  seq.view.shift = seq.view.seq_len;
  seq.view.evicted = {seq.evicted.data(), heads * slots, slots, slots};
  seq.view.positions = {seq.positions.data(), heads * slots, slots, slots};
}

void run(const Case& test) {
  Random random(test.k_dim + test.group);
  constexpr int64_t kLayer = 1;
  int64_t blocks = 1, rows = 0;
  for (auto [queries, slots] : test.lengths) blocks += (slots + test.block_size - 1) / test.block_size;
  TestCache cache(test.type, 2, blocks, test.heads, test.block_size, test.k_dim, test.v_dim);
  std::vector<Sequence> sequences(test.lengths.size());
  std::vector<SequenceView> views;
  int32_t next = (int32_t)blocks;  // from the last block down
  for (size_t i = 0; i < sequences.size(); ++i) {
    auto [queries, slots] = test.lengths[i];
    Sequence& seq = sequences[i];
    for (int64_t b = 0; b * test.block_size < slots; ++b) seq.blocks.push_back(--next);
    seq.view = {seq.blocks.data(), rows, queries, slots, 3, {nullptr, 0, 0, 0}, {nullptr, 0, 0, 0}};
    rows += queries;
    fill(cache, kLayer, seq, random);
    if (test.masks) add_masks(seq, test.heads, random);
    views.push_back(seq.view);
  }
  const int64_t heads = test.heads * test.group;
  Numbers q(test.type, rows * heads * test.k_dim), out(test.type, rows * heads * test.v_dim);
  q.randomise(random);
  std::vector<float> sinks(heads, 0.5f);
  const AttentionArgs args{cache.view, kLayer, rows_of(q, heads, test.k_dim), rows_of(out, heads, test.v_dim), rows,
                           heads, views.data(), (int64_t)views.size(), 0.3f, test.softcap, test.window,
                           test.sinks ? sinks.data() : nullptr};
  kernels().paged_attention(args);
  for (const Sequence& seq : sequences)
    for (int64_t i = 0; i < seq.view.query_len; ++i)
      for (int64_t h = 0; h < heads; ++h)
        check_row(args, cache, seq, q, out, seq.view.first_row + i, h, seq.view.seq_len - seq.view.query_len + i);
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
