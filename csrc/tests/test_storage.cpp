// Writes into coded formats: errors within half of the exact scale, nothing else touched.
#include <algorithm>

#include "test_cache.h"

namespace kvreclaim::tests {
namespace {

constexpr Format kWritten[] = {Format::kFP8, Format::kInt8, Format::kInt4, Format::kTurbo4};

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

void check_write(Format format, int64_t heads, int64_t size, int64_t k_dim, int64_t v_dim, bool latent) {
  const int64_t layers = 2, blocks = 3, layer = 1;
  TestCache cache(format, layers, blocks, heads, size, k_dim, v_dim, latent);
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
        KVR_CHECK(std::fabs(got - want) <= allowed(format, k, row * k_dim, k_dim, d), "key %ld dim %ld: %g, not %g",
                  (long)t, (long)d, got, want);
      }
      for (int64_t d = 0; d < v_dim; ++d) {
        const double got = cache.value(layer, block, h, s, d), want = v.get(row * v_dim + d);
        KVR_CHECK(std::fabs(got - want) <= allowed(format, v, row * v_dim, v_dim, d), "value %ld dim %ld: %g, not %g",
                  (long)t, (long)d, got, want);
      }
    }
}

KVR_TEST(coded_writes) {
  for (const Format format : kWritten)
    for (auto [k_dim, v_dim] : {std::pair<int64_t, int64_t>{8, 8}, {24, 40}, {64, 64}, {96, 8}})
      for (const int64_t size : {16, 48}) check_write(format, 3, size, k_dim, v_dim, false);
}

KVR_TEST(latent_writes) {
  for (const Format format : kWritten) check_write(format, 1, 16, 8, 72, true);
}

// What a sealed unit holds of numbers(slot, dim): keys by channel, values by token in groups, within half a step.
template <class Number>
void check_sealed_unit(const TestCache& cache, bool key, int64_t block, int64_t head, const Number& number) {
  const int64_t size = cache.view.block_size, dims = key ? cache.view.k_dim : cache.view.v_dim;
  const int64_t tall = key ? size : 1, wide = key ? 1 : kGroup;  // slots and dims that share a scale
  const double reach = key ? 40.5 : 7.5, least = key ? 0x1p-10 : 0x1p-8;
  for (int64_t slot = 0; slot < size; slot += tall)
    for (int64_t dim = 0; dim < dims; dim += wide) {
      double low = INFINITY, high = -INFINITY;
      const auto each = [&](const auto& visit) {
        for (int64_t s = slot; s < slot + tall; ++s)
          for (int64_t d = dim; d < std::min(dim + wide, dims); ++d) visit(s, d, number(s, d));
      };
      each([&](int64_t, int64_t, double x) { low = std::min(low, x), high = std::max(high, x); });
      const double step = std::max({(high - low) / 15, std::fabs(low + high) / 2 / reach, least});
      each([&](int64_t s, int64_t d, double x) {
        const double got = key ? cache.key(0, block, head, s, d) : cache.value(0, block, head, s, d);
        const double most = step / 2 * (1 + 1e-4) + std::fabs(x) / 256;
        KVR_CHECK(std::fabs(got - x) <= most, "block %d slot %d dim %d: %g, not %g", (int)block, (int)s, (int)d, got,
                  x);
      });
    }
}

// Block 0 is filled by one write from its last token on, block 2 ends in row 0, block 1 begins in row 1.
void check_seal(int64_t size, int64_t k_dim, int64_t v_dim, Type type) {
  const int64_t blocks = 3, heads = 2, begun = 5, tokens = size + begun;
  TestCache cache(Format::kKivi4, 1, blocks, heads, size, k_dim, v_dim);
  const CacheView& c = cache.view;
  Random random(k_dim + size);
  Numbers k(type, tokens * heads * k_dim), v(type, tokens * heads * v_dim);
  k.randomise(random), v.randomise(random);
  const std::vector<char> before = cache.units;
  std::vector<int64_t> whole, first(begun), rows(begun, 1);
  for (int64_t i = 0; i < size; ++i) whole.push_back(tokens - 1 - i);
  for (int64_t i = 0; i < begun; ++i) first[i] = i;
  const std::vector<int64_t> ended{0}, sealed{0, 2}, opened{1};
  kernels().seal_tokens({c, 0, rows_of(k, heads, k_dim), rows_of(v, heads, v_dim), first.data(), rows.data(),
                         first.data(), begun, whole.data(), 1, ended.data(), 1, sealed.data(), opened.data(), 1});
  for (const bool key : {true, false}) {
    const int64_t dims = key ? k_dim : v_dim;
    const Numbers &given = key ? k : v, &open = key ? cache.open_k : cache.open_v;
    for (int64_t h = 0; h < heads; ++h) {
      const auto of_write = [&](int64_t s, int64_t d) { return given.get((whole[s] * heads + h) * dims + d); };
      const auto of_row = [&](int64_t s, int64_t d) { return open.get((h * size + s) * dims + d); };
      check_sealed_unit(cache, key, 0, h, of_write);
      check_sealed_unit(cache, key, 2, h, of_row);
      for (int64_t i = 0; i < begun * dims; ++i) {
        const double want = given.get((i / dims * heads + h) * dims + i % dims);
        const double got = open.get(((heads + h) * size + i / dims) * dims + i % dims);
        KVR_CHECK(std::fabs(got - want) <= std::fabs(want) / 256, "row %d: %g, not %g", (int)(i / dims), got, want);
      }
    }
  }
  const int64_t from = 1 + heads * unit_bytes(c), state = k_code_bytes(c) + v_code_bytes(c) + kivi_params(c).state;
  for (int64_t i = 0; i < heads * unit_bytes(c); ++i) {
    const char want = i % unit_bytes(c) == state ? (char)kKiviOpen : before[from + i];
    KVR_CHECK(cache.units[from + i] == want, "byte %d of a block that was begun changed", (int)i);
  }
}

KVR_TEST(sealed_blocks) {
  for (auto [k_dim, v_dim] : {std::pair<int64_t, int64_t>{8, 8}, {24, 40}, {64, 64}, {96, 8}})
    for (const int64_t size : {16, 48})
      for (const Type type : {Type::kF32, Type::kBF16, Type::kF16}) check_seal(size, k_dim, v_dim, type);
}

KVR_TEST(writes_of_what_has_no_scale) {
  const float inf = INFINITY, nan = NAN;
  const std::vector<std::vector<float>> rows{{0, 0, 0, 0, 0, 0, 0, 0},
                                             {3, 3, 3, 3, 3, 3, 3, 3},
                                             {nan, 1, -1, 0, 0, 0, 0, 0},
                                             {inf, -inf, 1, 0, 0, 0, 0, 0},
                                             {1e-30f, -1e-30f, 0, 0, 0, 0, 0, 0},
                                             {3e38f, -3e38f, 1, 0, 0, 0, 0, 0}};
  for (const Format format : kWritten) {
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
        if (t == 1 && !is_rotated(format)) KVR_CHECK(std::fabs(got - 3) < 0.02, "a constant is %g", got);
        if (t == 2 && d == 0 && !is_rotated(format)) KVR_CHECK(std::fabs(got) < 0.07, "NaN is %g", got);
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
