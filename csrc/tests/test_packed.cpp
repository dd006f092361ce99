// packed_linear and unpack_rows on every kind and odd numbers of rows, against loops in double over unpacked weights.
#include "harness.h"

namespace kvreclaim::tests {
namespace {

struct Kind {
  Codes codes;
  Grid grid;
  int64_t group;
  bool is_wide;
};

constexpr Kind kKinds[] = {
    {Codes::kNibble, Grid::kScale, 32, false}, {Codes::kNibble, Grid::kScale, 64, true},
    {Codes::kNibble, Grid::kZero, 128, false}, {Codes::kNibble, Grid::kMin, 32, false},
    {Codes::kNibble, Grid::kMin, 32, true},    {Codes::kNibble, Grid::kSuper, 32, false},
    {Codes::kTable, Grid::kScale, 64, true},   {Codes::kSix, Grid::kSigned, 16, false},
    {Codes::kByte, Grid::kScale, 32, false},   {Codes::kTwo, Grid::kSuper, 16, false},
    {Codes::kThree, Grid::kSigned, 16, false}, {Codes::kFive, Grid::kScale, 32, false},
    {Codes::kFive, Grid::kMin, 32, false},     {Codes::kFive, Grid::kSuper, 32, false},
};

// A random matrix [out, in] in buffers of exactly the size that its kind needs.
struct Matrix {
  std::vector<char> data, scales, offsets, supers;
  PackedMatrix view;

  Matrix(const Kind& kind, int64_t out, int64_t in, Random& random) {
    const bool is_signed = kind.grid == Grid::kSigned, is_super = kind.grid == Grid::kSuper || is_signed;
    const int64_t each = is_signed ? 1 : 2;
    const int64_t blocks = (out + kBlockRows - 1) / kBlockRows, rows = blocks * kBlockRows;
    data = bytes(blocks * (in / kChunkCols) * lines_of(kind.codes) * 64, random);
    if (is_super) {
      scales = bytes(rows * (in / kind.group) * each, random);
      supers = numbers(rows * (in / kSuperCols) * each, false, random);
    } else {
      scales = numbers(rows * (in / kind.group), kind.is_wide, random);
      if (kind.grid == Grid::kZero) offsets = bytes(rows * (in / kind.group), random, 17);
      if (kind.grid == Grid::kMin) offsets = numbers(rows * (in / kind.group), kind.is_wide, random);
    }
    view = {kind.codes, kind.grid, kind.is_wide, out, in, kind.group, data.data(), scales.data(),
            offsets.data(), supers.data(), {}, {}, 1.0f / 127, {}, 1.0f / 16256};
    for (int i = 0; i < 16; ++i) {
      const long steps = std::lround(16256 * random.uniform()), high = (steps + 64) >> kLowBits;
      view.fine[0][i] = (int8_t)high, view.fine[1][i] = (int8_t)(steps - high * kHighUnit);
      view.values[i] = (float)steps * view.fine_unit;
      view.table[i] = (int8_t)std::lround(view.values[i] / view.unit);
    }
  }

  static std::vector<char> bytes(int64_t count, Random& random, int64_t below = 256) {
    std::vector<char> made(count);
    for (char& each : made) each = (char)random.below(below);
    return made;
  }

  static std::vector<char> numbers(int64_t count, bool is_wide, Random& random) {
    Numbers made(is_wide ? Type::kF32 : Type::kF16, count);
    for (int64_t i = 0; i < count; ++i) made.set(i, 0.01f + 0.01f * random.uniform());
    return {made.data(), made.data() + count * (is_wide ? 4 : 2)};
  }
};

// What rounding x may change, of the sum of |x| |w| with the largest x of each chunk: x in 127 or 16256 steps, and a
// table in as many.
double lost(Activations activations) {
  return activations == Activations::kExact ? 1e-6 : activations == Activations::kInt16 ? 1e-4 : 1.2e-2;
}

void check(const Kind& kind, Type type, int64_t rows, int64_t in, const std::vector<int64_t>& outs, Random& random) {
  std::vector<Matrix> matrices;
  std::vector<const PackedMatrix*> views;
  std::vector<Numbers> weights;
  int64_t all = 0;
  for (int64_t out : outs) matrices.emplace_back(kind, out, in, random), all += out;
  for (const Matrix& each : matrices) {
    std::vector<int64_t> ids(each.view.out);
    for (int64_t i = 0; i < each.view.out; ++i) ids[i] = i;
    views.push_back(&each.view);
    weights.emplace_back(Type::kF32, each.view.out * in);
    kernels().unpack_rows({&each.view, ids.data(), weights.back().data(), each.view.out, Type::kF32});
  }
  Numbers x(type, rows * in), bias(type, all);
  x.randomise(random);
  bias.randomise(random);
  for (Activations activations : {Activations::kInt8, Activations::kInt16, Activations::kExact}) {
    Numbers y(type, rows * all);
    kernels().packed_linear({x.data(), views.data(), (int64_t)views.size(), bias.data(), y.data(), rows, all, type,
                             activations});
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t i = 0, first = 0; i < (int64_t)outs.size(); first += outs[i++])
        for (int64_t n = 0; n < outs[i]; ++n) {
          double want = bias.get(first + n), most = 1;
          for (int64_t k = 0; k < in; ++k) {
            const double w = weights[i].get(n * in + k);
            want += x.get(m * in + k) * w, most += std::fabs(w);
          }
          const double allowed = lost(activations) * most + (type == Type::kBF16 ? std::fabs(want) / 256 : 0.0);
          const double got = y.get(m * all + first + n);
          KVR_CHECK(std::fabs(got - want) <= allowed, "kind %d %d, %ld columns, row %ld, output %ld: %g, not %g",
                    (int)kind.codes, (int)kind.grid, (long)in, (long)m, (long)(first + n), got, want);
        }
  }
}

KVR_TEST(packed_linear_of_every_kind) {
  Random random(5);
  for (const Kind& kind : kKinds)
    for (Type type : {Type::kBF16, Type::kF32})
      for (int64_t rows : {1, 2, 3, 5, 8, 11}) check(kind, type, rows, rows % 2 == 0 ? 512 : 256, {40, 17, 3}, random);
}

// Rows for which CPUs with matrix tiles have other loops, and more than these take at once.
KVR_TEST(packed_linear_of_many_rows) {
  Random random(7);
  for (const Kind& kind : kKinds) check(kind, Type::kF32, 67, 512, {40, 130, 3}, random);
  for (Type type : {Type::kBF16, Type::kF32}) check(kKinds[5], type, 533, 256, {17}, random);
  check(kKinds[8], Type::kBF16, 97, 288, {50}, random);
}

KVR_TEST(packed_linear_over_many_threads) {
  Random random(6);
  for (const Kind& kind : kKinds) check(kind, Type::kBF16, 3, 1024, {130, 16}, random);
}

}  // namespace
}  // namespace kvreclaim::tests
