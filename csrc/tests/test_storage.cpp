// Writes into coded formats: errors within half of the exact scale, nothing else touched.
#include <algorithm>

#include "test_cache.h"

namespace kvreclaim::tests {
namespace {

// Greatest error that the format allows for dim d of a row.
double allowed(Format format, const Numbers& x, int64_t row, int64_t dims, int64_t d) {
  double low = INFINITY, high = -INFINITY, squares = 0;
  for (int64_t e = 0; e < dims; ++e) {
    const double y = x.get(row + e);
    low = std::min(low, y), high = std::max(high, y), squares += y * y;
  }
  const double most = std::max(-low, high), slack = 1 + 1e-4;
  switch (format) {
    case Format::kInt8: return slack * most / 254;
    case Format::kFP8: return slack * std::max(std::fabs((double)x.get(row + d)) / 16, most / 448 / 1024);
    case Format::kInt4: return slack * std::sqrt(squares * dims) / 15;  // half a step in each of the rotated dims
    default: return 1.5 * std::sqrt(squares);  // no bound per number: see the levels' own test
  }
}

void check_write(Formats formats, int64_t heads, int64_t size, int64_t k_dim, int64_t v_dim, bool latent) {
  const int64_t layers = 2, blocks = 3, layer = 1;
  TestCache cache(formats, layers, blocks, heads, size, k_dim, v_dim, latent);
  const CacheView& c = cache.view;
  Random random(k_dim * size);
  std::vector<int64_t> slots{blocks * size - 1, 0, 2 * size + 5, 7, 2 * size + 4, 1};
  for (int64_t i = 0; i < 16; ++i) slots.push_back(size + i);
  const int64_t tokens = (int64_t)slots.size();
  Numbers k(Type::kF32, tokens * heads * k_dim), v(Type::kBF16, tokens * heads * v_dim);
  k.randomise(random), v.randomise(random);
  const std::vector<char> before = cache.units;
  std::vector<double> others;
  const auto visit = [&](bool check) {
    size_t at = 0;
    for (int64_t l = 0; l < layers; ++l)
      for (int64_t slot = 0; slot < blocks * size; ++slot) {
        const int64_t block = slot / size, s = slot % size;
        if (l == layer && std::count(slots.begin(), slots.end(), slot)) continue;
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t d = 0; d < head_dim(c) + v_dim; ++d) {
            const int64_t e = d - head_dim(c);
            const double x = e < 0 ? cache.key(l, block, h, s, d) : cache.value(l, block, h, s, e);
            if (!check)
              others.push_back(x);
            else
              KVR_CHECK(x == others[at++], "layer %ld slot %ld dim %ld changed", (long)l, (long)slot, (long)d);
          }
      }
  };
  visit(false);
  kernels().write_kv({c, layer, rows_of(k, heads, k_dim), rows_of(v, heads, v_dim), slots.data(), tokens});
  visit(true);
  const int64_t first = (int64_t)cache.units.size() / layers;
  KVR_CHECK(std::equal(before.begin(), before.begin() + first, cache.units.begin()), "layer 0 changed");
  const int64_t shared = head_dim(c) - k_dim;  // dims of a latent key that its value holds
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t block = slots[t] / size, s = slots[t] % size, row = t * heads + h;
      for (int64_t d = 0; d < k_dim; ++d) {
        const double got = cache.key(layer, block, h, s, shared + d), want = k.get(row * k_dim + d);
        KVR_CHECK(std::fabs(got - want) <= allowed(formats.k, k, row * k_dim, k_dim, d), "key %ld dim %ld: %g, not %g",
                  (long)t, (long)d, got, want);
      }
      for (int64_t d = 0; d < v_dim; ++d) {
        const double got = cache.value(layer, block, h, s, d), want = v.get(row * v_dim + d);
        KVR_CHECK(std::fabs(got - want) <= allowed(formats.v, v, row * v_dim, v_dim, d), "value %ld dim %ld: %g, not %g",
                  (long)t, (long)d, got, want);
      }
    }
}

KVR_TEST(coded_writes) {
  for (const Formats format : kCoded)
    for (auto [k_dim, v_dim] : {std::pair<int64_t, int64_t>{8, 8}, {24, 40}, {64, 64}, {96, 8}})
      for (const int64_t size : {16, 48}) check_write(format, 3, size, k_dim, v_dim, false);
}

KVR_TEST(latent_writes) {
  for (const Formats format : kCoded) check_write(format, 1, 16, 8, 72, true);
}

KVR_TEST(writes_of_what_has_no_scale) {
  const float inf = INFINITY, nan = NAN;
  const std::vector<std::vector<float>> rows{{0, 0, 0, 0, 0, 0, 0, 0},
                                             {3, 3, 3, 3, 3, 3, 3, 3},
                                             {nan, 1, -1, 0, 0, 0, 0, 0},
                                             {inf, -inf, 1, 0, 0, 0, 0, 0},
                                             {1e-30f, -1e-30f, 0, 0, 0, 0, 0, 0},
                                             {3e38f, -3e38f, 1, 0, 0, 0, 0, 0}};
  for (const Formats format : kCoded) {
    TestCache cache(format, 1, 1, 1, 16, 8, 8);
    Numbers x(Type::kF32, 48);
    std::vector<int64_t> slots;
    for (size_t t = 0; t < rows.size(); ++t) {
      slots.push_back(15 - (int64_t)t);
      for (int64_t d = 0; d < 8; ++d) x.set(t * 8 + d, rows[t][d]);
    }
    kernels().write_kv({cache.view, 0, rows_of(x, 1, 8), rows_of(x, 1, 8), slots.data(), (int64_t)slots.size()});
    for (size_t t = 0; t < rows.size(); ++t)
      for (int64_t d = 0; d < 8; ++d) {
        const double got = cache.value(0, 0, 0, slots[t], d), key = cache.key(0, 0, 0, slots[t], d);
        KVR_CHECK(std::isfinite(got) && std::isfinite(key), "row %d", (int)t);
        if (t == 0) KVR_CHECK(got == 0 && key == 0, "zeros are %g", got);
        if (t == 1 && !is_rotated(format.v)) KVR_CHECK(std::fabs(got - 3) < 0.02, "a constant is %g", got);
        if (t == 2 && d == 0 && !is_rotated(format.v)) KVR_CHECK(std::fabs(got) < 0.07, "NaN is %g", got);
      }
  }
}

KVR_TEST(fp16_is_rounded_to_even) {
  TestCache cache(Format::kF16, 1, 1, 1, 16, 8, 8);
  const std::vector<float> numbers{1.0f,         1.00048828125f, 1.00146484375f, -65504.0f,
                                   5.9604645e-8f, 2.9802322e-8f,  6.1e-5f,        0.333333f};
  Numbers x(Type::kF32, 8);
  for (int64_t d = 0; d < 8; ++d) x.set(d, numbers[d]);
  const int64_t slot = 3;
  kernels().write_kv({cache.view, 0, rows_of(x, 1, 8), rows_of(x, 1, 8), &slot, 1});
  for (int64_t d = 0; d < 8; ++d) {
    const double want = widen_f16(round_f16(numbers[d]));
    KVR_CHECK(cache.value(0, 0, 0, slot, d) == want && cache.key(0, 0, 0, slot, d) == want, "%g, not %g",
              cache.value(0, 0, 0, slot, d), want);
  }
}

}  // namespace
}  // namespace kvreclaim::tests
