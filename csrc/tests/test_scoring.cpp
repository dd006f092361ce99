// Scoring, mixtures, norms, selection and compaction against plain loops in double.
#include <algorithm>

#include "test_cache.h"

namespace kvreclaim::tests {
namespace {

// One sequence of `tokens` random tokens in blocks of random order, NaN around them.
struct World {
  TestCache cache;
  std::vector<int64_t> ids;
  int64_t tokens;
  Random random{7};

  World(Formats format, int64_t layers, int64_t heads, int64_t size, int64_t k_dim, int64_t v_dim, int64_t tokens,
        bool latent = false)
      : cache(format, layers, (tokens + size - 1) / size + 2, heads, size, k_dim, v_dim, latent), tokens(tokens) {
    const int64_t used = (tokens + size - 1) / size;
    for (int64_t b = 0; b < used + 2; ++b) ids.push_back(b);
    for (int64_t b = used + 1; b > 0; --b) std::swap(ids[b], ids[random.below(b + 1)]);
    ids.resize(used);
    ids.shrink_to_fit();
    std::vector<int64_t> slots(tokens);
    for (int64_t t = 0; t < tokens; ++t) slots[t] = ids[t / size] * size + t % size;
    for (int64_t l = 0; l < layers; ++l) {
      Numbers k(Type::kF32, tokens * heads * k_dim), v(Type::kF32, tokens * heads * v_dim);
      k.randomise(random), v.randomise(random);
      kernels().write_kv({cache.view, l, rows_of(k, heads, k_dim), rows_of(v, heads, v_dim), slots.data(), tokens});
    }
  }

  double key(int64_t layer, int64_t head, int64_t t, int64_t d) const {
    const int64_t size = cache.view.block_size;
    return cache.key(layer, ids[t / size], head, t % size, d);
  }
  double value(int64_t layer, int64_t head, int64_t t, int64_t d) const {
    const int64_t size = cache.view.block_size;
    return cache.value(layer, ids[t / size], head, t % size, d);
  }
  std::vector<float> numbers(int64_t count) {
    std::vector<float> x(count);
    for (float& y : x) y = random.uniform();
    return x;
  }
  TokensView tokens_view(int64_t layer) const { return {cache.view, layer, ids.data(), tokens}; }
};

void check_trig(World& world, int64_t group, int64_t rows, int64_t start, int64_t bands, bool interleaved) {
  const CacheView& c = world.cache.view;
  const int64_t heads = c.heads * group, layer = c.layers - 1, dims = head_dim(c);
  const std::vector<float> q = world.numbers(heads * rows * dims), w = world.numbers(heads * bands);
  std::vector<float> out(heads * world.tokens, std::numeric_limits<float>::quiet_NaN());
  kernels().trig_norm_scores({world.tokens_view(layer), q.data(), w.data(), heads, rows, start, bands, interleaved,
                              out.data()});
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t t = 0; t < world.tokens; ++t) {
      const auto dim = [&](int64_t d) { return world.key(layer, h / group, t, d); };
      double best = rows == 0 ? 0 : -1e300, norms = 0, size = 0;
      for (int64_t r = 0; r < rows; ++r) {
        double sum = 0, sizes = 0;
        for (int64_t d = 0; d < dims; ++d) {
          const double term = q[(h * rows + r) * dims + d] * dim(d);
          sum += term, sizes += std::abs(term);
        }
        best = std::max(best, sum), size = std::max(size, sizes);
      }
      for (int64_t f = 0; f < bands; ++f) {
        const int64_t d = start + (interleaved ? 2 * f : f), e = interleaved ? d + 1 : d + bands;
        norms += w[h * bands + f] * std::hypot(dim(d), dim(e));
      }
      const double got = out[h * world.tokens + t];
      KVR_CHECK(std::abs(got - (best + norms)) < std::max(2e-5, 1e-6 * (size + std::abs(norms))),
                "%g, not %g + %g", got, best, norms);
    }
}

void check_mixture(World& world, int64_t group, int64_t count, int64_t offsets, int64_t begin, int64_t end) {
  const CacheView& c = world.cache.view;
  const int64_t heads = c.heads * group, dims = head_dim(c);
  const std::vector<float> mu = world.numbers(heads * count * offsets * dims);
  std::vector<float> var = world.numbers(heads * count * dims);
  for (float& x : var) x = std::abs(x);
  for (int64_t i = 0; i < (int64_t)var.size(); i += 2) var[i + 1] = var[i];
  std::vector<float> out(c.heads * world.tokens, std::numeric_limits<float>::quiet_NaN());
  const float scale = 1.0f / std::sqrt((float)dims);
  kernels().mixture_scores({world.tokens_view(0), mu.data(), var.data(), heads, count, offsets, scale, begin, end,
                            out.data()});
  for (int64_t k = 0; k < c.heads; ++k) {
    std::vector<double> best(world.tokens, 0.0);
    for (int64_t i = k * group * count; i < (k + 1) * group * count; ++i) {
      std::vector<double> mean(world.tokens, 0.0);
      for (int64_t o = 0; o < offsets; ++o) {
        std::vector<double> weight(world.tokens, 0.0);
        double sum = 0;
        for (int64_t t = begin; t < end; ++t) {
          double logit = 0;
          for (int64_t d = 0; d < dims; ++d) {
            const double x = world.key(0, k, t, d);
            logit += scale * mu[(i * offsets + o) * dims + d] * x +
                     0.5 * scale * scale * var[i * dims + d] * x * x;
          }
          sum += weight[t] = std::exp(logit);
        }
        for (int64_t t = begin; t < end; ++t) mean[t] += weight[t] / sum / offsets;
      }
      for (int64_t t = begin; t < end; ++t) best[t] = std::max(best[t], mean[t]);
    }
    for (int64_t t = 0; t < world.tokens; ++t) {
      const double got = out[k * world.tokens + t];
      KVR_CHECK(std::abs(got - best[t]) <= 1e-5 * best[t], "%g, not %g", got, best[t]);
    }
  }
}

// owned: a row of weights per block, instead of one per head.
void check_surrogate(World& world, int64_t start, int64_t bands, bool interleaved, bool owned) {
  const CacheView& c = world.cache.view;
  const int64_t layer = c.layers - 1, dims = head_dim(c), width = surrogate_width(c, bands);
  std::vector<int64_t> owners;
  for (size_t i = 0; owned && i < world.ids.size(); ++i) owners.push_back(world.random.below(4));
  const std::vector<float> weights = world.numbers((owned ? 4 : c.heads) * width);
  std::vector<float> out(c.heads * world.tokens, std::numeric_limits<float>::quiet_NaN());
  kernels().surrogate_scores({world.tokens_view(layer), weights.data(), owned ? owners.data() : nullptr, start, bands,
                              interleaved, out.data()});
  for (int64_t h = 0; h < c.heads; ++h)
    for (int64_t t = 0; t < world.tokens; ++t) {
      const float* w = weights.data() + (owned ? owners[t / c.block_size] : h) * width;
      double sum = 0, size = 0, keys = 0, values = 0;
      const auto add = [&](double x) { sum += x * *w, size += std::abs(x * *w++); };
      for (int64_t d = 0; d < dims; ++d) keys += std::pow(world.key(layer, h, t, d), 2);
      for (int64_t f = 0; f < bands; ++f) {
        const int64_t d = start + (interleaved ? 2 * f : f), e = interleaved ? d + 1 : d + bands;
        add(std::log(std::pow(world.key(layer, h, t, d), 2) + std::pow(world.key(layer, h, t, e), 2) + 1e-6));
      }
      for (int64_t d = 0; d < dims; ++d)
        if (d < start || d >= start + 2 * bands) add(world.key(layer, h, t, d));
      for (int64_t d = 0; d < c.v_dim; ++d) {
        add(world.value(layer, h, t, d));
        values += std::pow(world.value(layer, h, t, d), 2);
      }
      add(std::sqrt(keys)), add(std::log(std::sqrt(values) + 1e-6)), add(1.0);
      const double got = out[h * world.tokens + t];
      KVR_CHECK(std::abs(got - sum) <= 2e-6 * size, "%g, not %g", got, sum);
    }
}

void check_norms(World& world) {
  const CacheView& c = world.cache.view;
  std::vector<float> out(c.heads * world.tokens);
  for (const bool values : {false, true}) {
    kernels().token_norms({world.tokens_view(0), values, out.data()});
    for (int64_t k = 0; k < c.heads; ++k)
      for (int64_t t = 0; t < world.tokens; ++t) {
        double sum = 0;
        for (int64_t d = 0; d < (values ? c.v_dim : head_dim(c)); ++d) {
          const double x = values ? world.value(0, k, t, d) : world.key(0, k, t, d);
          sum += x * x;
        }
        const double got = out[k * world.tokens + t];
        KVR_CHECK(std::abs(got - std::sqrt(sum)) <= 1e-6 * std::sqrt(sum), "%g, not %g", got, std::sqrt(sum));
      }
  }
}

// order: 0 the old table, 1 its first block redirected, 2 reversed.
void check_compact(World& world, int64_t kept_layers, int64_t kept_heads, int64_t count, int order) {
  const CacheView& c = world.cache.view;
  const int64_t size = c.block_size, targets = (count + size - 1) / size;
  std::vector<int64_t> kept;
  for (int64_t row = 0; row < kept_layers * kept_heads; ++row) {
    std::vector<int64_t> slots(world.tokens);
    for (int64_t t = 0; t < world.tokens; ++t) slots[t] = t;
    for (int64_t t = world.tokens - 1; t > 0; --t) std::swap(slots[t], slots[world.random.below(t + 1)]);
    std::sort(slots.begin(), slots.begin() + count);
    kept.insert(kept.end(), slots.begin(), slots.begin() + count);
  }
  std::vector<int64_t> to = world.ids;
  if (order == 1)  // a block that the table does not name
    for (int64_t b = 0; b < c.blocks; ++b)
      if (std::find(world.ids.begin(), world.ids.end(), b) == world.ids.end()) to[0] = b;
  if (order == 2) std::reverse(to.begin(), to.end());
  to.resize(targets);
  to.shrink_to_fit();
  std::vector<double> want;
  const auto visit = [&](bool write) {
    size_t i = 0;
    for (int64_t l = 0; l < c.layers; ++l)
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t m = 0; m < count; ++m) {
          const int64_t row = (kept_layers > 1 ? l : 0) * kept_heads + (kept_heads > 1 ? h : 0);
          const int64_t t = write ? kept[row * count + m] : m;
          for (int64_t d = 0; d < head_dim(c) + c.v_dim; ++d) {
            const double x = d < head_dim(c) ? world.key(l, h, t, d) : world.value(l, h, t, d - head_dim(c));
            if (write)
              want.push_back(x);
            else
              KVR_CHECK(x == want[i++], "layer %d head %d slot %d dim %d", (int)l, (int)h, (int)m, (int)d);
          }
        }
  };
  visit(true);
  kernels().compact({c, kept.data(), kept_layers, kept_heads, count, world.ids.data(), (int64_t)world.ids.size(),
                     to.data()});
  world.ids = to;
  visit(false);
}

void check_select() {
  Random random(3);
  for (const int64_t columns : {1, 7, 64, 2000})
    for (const int64_t places : {(int64_t)0, (columns + 1) / 2, columns}) {
      std::vector<float> scores(3 * columns);
      for (float& x : scores) x = (float)random.below(50) - 25.0f;
      std::vector<int64_t> out(3 * places);
      bool nan = false;
      kernels().select_top({scores.data(), 3, columns, places, out.data(), &nan});
      KVR_CHECK(!nan, "no score is");
      for (int64_t row = 0; row < 3; ++row) {
        std::vector<int64_t> order(columns);
        for (int64_t i = 0; i < columns; ++i) order[i] = i;
        const float* x = scores.data() + row * columns;
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x[a] > x[b]; });
        std::sort(order.begin(), order.begin() + places);
        KVR_CHECK(std::equal(order.begin(), order.begin() + places, out.begin() + row * places), "%d of %d",
                  (int)places, (int)columns);
      }
    }
}

constexpr int64_t kLengths[] = {1, 15, 16, 17, 33, 100};

KVR_TEST(scores_of_keys) {
  for (const Formats format : kCacheFormats)
    for (const int64_t tokens : kLengths) {
      if (!is_plain(format) && tokens == 15) continue;
      World small(format, 1, 2, 16, 32, 40, tokens), large(format, 2, 3, 48, 80, 8, tokens);
      for (const bool interleaved : {false, true}) {
        for (const int64_t rows : {0, 1, 5}) {
          check_trig(small, 4, rows, 0, 16, interleaved);
          check_trig(large, 3, rows, 5, 9, interleaved);
        }
        check_trig(large, 1, 1, 0, 0, interleaved);
      }
      check_mixture(small, 2, 3, 5, 0, tokens);
      check_mixture(large, 1, 7, 3, tokens / 3, tokens - tokens / 4);
      check_surrogate(small, 0, 16, false, true);
      check_surrogate(large, 5, 9, true, false);
      check_surrogate(large, 0, 0, false, false);
      check_norms(small);
      check_norms(large);
    }
}

KVR_TEST(scores_of_latent_keys) {
  for (const Formats format : kCacheFormats) {
    World latent(format, 2, 1, 16, 8, 72, 33, true);
    check_trig(latent, 3, 1, 72, 4, true);
    check_mixture(latent, 2, 2, 2, 3, 30);
    check_surrogate(latent, 72, 4, true, false);
    check_norms(latent);
  }
}

KVR_TEST(compaction) {
  for (const Formats format : kCacheFormats)
    for (const int64_t tokens : kLengths)
      for (const int order : {0, 1, 2})
        for (const int64_t count : {tokens, (tokens + 1) / 2, (int64_t)1}) {
          World each(format, 2, 2, 16, 32, 40, tokens), shared(format, 2, 3, 32, 8, 24, tokens);
          check_compact(each, 2, 2, count, order);
          check_compact(shared, 1, order == 0 ? 1 : 3, count, order);
        }
}

KVR_TEST(selection) { check_select(); }

}  // namespace
}  // namespace kvreclaim::tests
