// A cache with a few sequences in it, for tests of what reads them through attention's arguments.
#pragma once

#include <optional>

#include "test_cache.h"

namespace kvreclaim::tests {

struct Case {
  Type type;
  int64_t heads, group, block_size, k_dim, v_dim;
  std::vector<std::pair<int64_t, int64_t>> lengths;  // (queries, slots)
  float softcap = 0;
  int64_t window = 0;
  bool sinks = false, positions = false;
  std::optional<Formats> formats = {};  // of the cache; none: the type's
  bool latent = false;
};

struct Sequence {
  std::vector<int32_t> blocks;
  std::vector<int32_t> positions;
  SequenceView view;
};

// One past the last slot a query sees is its own slot + 1; the rest is as AttentionArgs says.
inline bool sees(const AttentionArgs& a, const Sequence& seq, int64_t head, int64_t query, int64_t slot) {
  if (slot > query) return false;
  const SequenceView& view = seq.view;
  int64_t position = slot + view.shift;
  if (view.positions.data && slot < view.positions.slots)
    position = view.positions.data[a.layer * view.positions.stride_layer + head * view.positions.stride_head + slot];
  return a.window == 0 || query + view.shift - position < a.window;
}

inline void check_number(double got, double want, const char* what, int64_t token) {
  KVR_CHECK(std::fabs(got - want) <= 2e-6 * (1 + std::fabs(want)), "%s %ld: %g, not %g", what, (long)token, got, want);
}

// Writes random tokens and reads all back.
inline void fill(TestCache& cache, int64_t layer, const Sequence& seq, Random& random) {
  const CacheView& c = cache.view;
  const int64_t tokens = seq.view.seq_len, dims = head_dim(c);
  Numbers k(cache.k.type(), tokens * c.heads * c.k_dim), v(cache.v.type(), tokens * c.heads * c.v_dim);
  k.randomise(random), v.randomise(random);
  std::vector<int64_t> slots(tokens), ids(seq.blocks.begin(), seq.blocks.end());
  for (int64_t t = 0; t < tokens; ++t)
    slots[t] = seq.blocks[t / c.block_size] * c.block_size + t % c.block_size;
  kernels().write_kv({c, layer, rows_of(k, c.heads, c.k_dim), rows_of(v, c.heads, c.v_dim), slots.data(), tokens});
  Numbers k_back(k.type(), tokens * c.heads * dims), v_back(v.type(), v.count());
  kernels().gather_tokens({c, layer, ids.data(), tokens, k_back.data(), v_back.data()});
  for (int64_t h = 0; h < c.heads; ++h)
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t block = seq.blocks[t / c.block_size], s = t % c.block_size;
      for (int64_t d = 0; d < dims; ++d)
        check_number(k_back.get((h * tokens + t) * dims + d), cache.key(layer, block, h, s, d), "key", t);
      for (int64_t d = 0; d < c.v_dim; ++d)
        check_number(v_back.get((h * tokens + t) * c.v_dim + d), cache.value(layer, block, h, s, d), "value", t);
      if (!is_plain(c.formats)) continue;
      for (int64_t d = 0; d < c.k_dim; ++d)
        KVR_CHECK(cache.k.get(cache.k_index(layer, block, h, s, d)) == k.get((t * c.heads + h) * c.k_dim + d),
                  "key %ld", (long)t);
      for (int64_t d = 0; d < c.v_dim; ++d)
        KVR_CHECK(cache.v.get(cache.v_index(layer, block, h, s, d)) == v.get((t * c.heads + h) * c.v_dim + d),
                  "value %ld", (long)t);
    }
}

inline void add_positions(Sequence& seq, int64_t heads, Random& random) {
  const int64_t slots = seq.view.seq_len - 1;
  if (slots <= 0) return;
  for (int64_t i = 0; i < 2 * heads * slots; ++i) seq.positions.push_back((int32_t)(2 * (i % slots) + random.below(2)));
  seq.view.shift = seq.view.seq_len;
  seq.view.positions = {seq.positions.data(), heads * slots, slots, slots};
}

// The softmax's definition: e^score of every slot that a query head sees, else 0.
inline std::vector<double> weights_of(const AttentionArgs& a, const TestCache& cache, const Sequence& seq,
                                      const Numbers& q, int64_t row, int64_t head, int64_t query) {
  const CacheView& c = cache.view;
  const int64_t kv_head = head / (a.num_heads / c.heads);
  std::vector<double> weights(query + 1, 0.0);
  for (int64_t slot = 0; slot <= query; ++slot) {
    if (!sees(a, seq, kv_head, query, slot)) continue;
    const int64_t block = seq.blocks[slot / c.block_size], s = slot % c.block_size;
    double score = 0;
    for (int64_t d = 0; d < head_dim(c); ++d)
      score += (double)q.get((row * a.num_heads + head) * head_dim(c) + d) * cache.key(a.layer, block, kv_head, s, d);
    score *= a.scale;
    if (a.softcap != 0) score = a.softcap * std::tanh(score / a.softcap);
    weights[slot] = std::exp(score);
  }
  return weights;
}

// A case laid out in memory; not copied, since args points into it.
struct Layout {
  static constexpr int64_t kLayer = 1;
  TestCache cache;
  std::vector<Sequence> sequences;
  std::vector<SequenceView> views;
  int64_t rows = 0;
  Numbers q, out;
  std::vector<float> sinks;
  AttentionArgs args;

  explicit Layout(const Case& test) : Layout(test, Random(test.k_dim + test.group)) {}
  Layout(const Layout&) = delete;

 private:
  static int64_t count_blocks(const Case& test) {
    int64_t blocks = 1;
    for (auto [queries, slots] : test.lengths) blocks += (slots + test.block_size - 1) / test.block_size;
    return blocks;
  }
  static int64_t count_rows(const Case& test) {
    int64_t rows = 0;
    for (auto [queries, slots] : test.lengths) rows += queries;
    return rows;
  }

  Layout(const Case& test, Random random)
      : cache(test.formats.value_or((Format)test.type), 2, count_blocks(test), test.heads, test.block_size, test.k_dim,
              test.v_dim, test.latent),
        sequences(test.lengths.size()),
        q(test.type, count_rows(test) * test.heads * test.group * head_dim(cache.view)),
        out(test.type, count_rows(test) * test.heads * test.group * test.v_dim),
        sinks(test.heads * test.group, 0.5f) {
    int32_t next = (int32_t)cache.view.blocks;  // from the last block down
    for (size_t i = 0; i < sequences.size(); ++i) {
      auto [queries, slots] = test.lengths[i];
      Sequence& seq = sequences[i];
      for (int64_t b = 0; b * test.block_size < slots; ++b) seq.blocks.push_back(--next);
      seq.view = {seq.blocks.data(), rows, queries, slots, 3, {nullptr, 0, 0, 0}};
      rows += queries;
      fill(cache, kLayer, seq, random);
      if (test.positions) add_positions(seq, test.heads, random);
      views.push_back(seq.view);
    }
    const int64_t heads = test.heads * test.group;
    q.randomise(random);
    args = {cache.view, kLayer, rows_of(q, heads, head_dim(cache.view)), rows_of(out, heads, test.v_dim), rows, heads,
            views.data(), (int64_t)views.size(), 0.3f, test.softcap, test.window,
            test.sinks ? sinks.data() : nullptr, heads};
  }
};

}  // namespace kvreclaim::tests
