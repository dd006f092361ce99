// transform_rows on odd shapes and strides against loops in double.
#include "harness.h"

namespace kvreclaim::tests {
namespace {

struct Shape {
  int64_t tokens, kv_heads, group, dim, directions;
};

// Rows lie apart by more than they hold, in x and in y; what is between stays as it is.
void run(const Shape& shape, Type type, Type constants, bool has_offset) {
  const auto [tokens, kv_heads, group, dim, count] = shape;
  const int64_t heads = kv_heads * group, stride_h = dim + 8, stride_t = heads * stride_h + 3;
  const int64_t last = tokens == 0 ? 0 : (tokens - 1) * stride_t + (heads - 1) * stride_h + dim;
  Numbers x(type, last), y(type, last, 7.0f);
  Numbers f(constants, kv_heads * dim), o(constants, kv_heads * dim);
  Numbers u(constants, kv_heads * count * dim), v(constants, kv_heads * count * dim);
  Random random(dim * heads + count);
  for (Numbers* each : {&x, &f, &o, &u, &v}) each->randomise(random);
  kernels().transform_rows({{x.data(), stride_t, stride_h, 1, type},
                            {y.data(), stride_t, stride_h, 1, type},
                            f.data(),
                            has_offset ? o.data() : nullptr,
                            count > 0 ? u.data() : nullptr,
                            count > 0 ? v.data() : nullptr,
                            constants, tokens, kv_heads, group, dim, count});
  std::vector<double> want(last, 7.0);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t row = t * stride_t + h * stride_h, own = h / group;
      std::vector<double> z(dim);
      for (int64_t d = 0; d < dim; ++d)
        z[d] = (double)x.get(row + d) * f.get(own * dim + d) + (has_offset ? o.get(own * dim + d) : 0.0);
      for (int64_t d = 0; d < dim; ++d) want[row + d] = z[d];
      for (int64_t r = 0; r < count; ++r) {
        double part = 0;
        for (int64_t d = 0; d < dim; ++d) part += z[d] * u.get((own * count + r) * dim + d);
        for (int64_t d = 0; d < dim; ++d) want[row + d] += part * v.get((own * count + r) * dim + d);
      }
    }
  const double step = type == Type::kF32 ? 0 : type == Type::kBF16 ? 1.0 / 256 : 1.0 / 2048;
  for (int64_t i = 0; i < last; ++i)
    KVR_CHECK(std::fabs(y.get(i) - want[i]) <= std::fabs(want[i]) * step + 2e-5, "dim %ld, number %ld: %g, not %g",
              (long)dim, (long)i, y.get(i), want[i]);
}

KVR_TEST(transform_shapes) {
  for (Type type : {Type::kF32, Type::kBF16, Type::kF16})
    for (int64_t dim : {8, 24, 64, 80, 96, 128, 256})
      for (int64_t directions : {0, 1, 4, 6})
        for (bool has_offset : {false, true}) run({3, 2, 3, dim, directions}, type, type, has_offset);
}

KVR_TEST(transform_of_many_rows) {
  for (Type type : {Type::kF32, Type::kBF16, Type::kF16}) {
    run({70, 2, 4, 128, 4}, type, Type::kF32, true);
    run({0, 2, 1, 64, 4}, type, Type::kBF16, true);
    run({1, 1, 1, 64, 4}, type, Type::kF16, false);
  }
}

}  // namespace
}  // namespace kvreclaim::tests
