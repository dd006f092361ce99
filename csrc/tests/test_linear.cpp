// linear and rms_norm on odd shapes against loops in double.
#include "harness.h"

namespace kvreclaim::tests {
namespace {

void check_linear(Type type, int64_t rows, int64_t in, int64_t out, bool with_bias, Random& random) {
  const int64_t stride = in + 3;
  Numbers x(type, (rows - 1) * stride + in), w(type, out * in), bias(type, out), y(type, rows * out);
  x.randomise(random);
  w.randomise(random);
  bias.randomise(random);
  kernels().linear({x.data(), w.data(), with_bias ? bias.data() : nullptr, y.data(), rows, in, out, stride, type});
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < out; ++n) {
      double want = with_bias ? bias.get(n) : 0.0;
      for (int64_t k = 0; k < in; ++k) want += (double)x.get(m * stride + k) * w.get(n * in + k);
      const double tolerance = 1e-5 * (double)in + (type == Type::kBF16 ? std::fabs(want) / 256 : 0.0);
      KVR_CHECK(std::fabs(y.get(m * out + n) - want) <= tolerance, "%ld x %ld -> %ld, row %ld, output %ld: %g, not %g",
                (long)rows, (long)in, (long)out, (long)m, (long)n, y.get(m * out + n), want);
    }
  Numbers alone(type, out);
  const int64_t size = size_of(type);
  for (int64_t m = 0; m < rows; ++m) {
    kernels().linear({x.data() + m * stride * size, w.data(), with_bias ? bias.data() : nullptr, alone.data(), 1, in, out,
                      stride, type});
    KVR_CHECK(std::memcmp(alone.data(), y.data() + m * out * size, (size_t)(out * size)) == 0,
              "%ld x %ld -> %ld: row %ld is another one alone", (long)rows, (long)in, (long)out, (long)m);
  }
}

KVR_TEST(linear_on_odd_shapes) {
  Random random(3);
  const int64_t sizes[][2] = {{1, 1}, {31, 3}, {33, 17}, {70, 150}, {96, 64}, {513, 130}, {1601, 70}, {3301, 37}};
  for (const auto& size : sizes)
    for (Type type : {Type::kBF16, Type::kF32})
      for (int64_t rows : {1, 2, 3, 4, 6, 7, 13, 33, 64, 100, 131})
        check_linear(type, rows, size[0], size[1], rows % 2 == 0, random);
}

KVR_TEST(rms_norm_on_odd_shapes) {
  Random random(4);
  for (int64_t dim : {1, 8, 31, 64, 130, 1025})
    for (Type type : {Type::kBF16, Type::kF32}) {
      const int64_t rows = 37;
      Numbers x(type, rows * dim), weight(type, dim), y(type, rows * dim);
      x.randomise(random);
      weight.randomise(random);
      kernels().rms_norm({x.data(), weight.data(), y.data(), rows, dim, 1e-5f, type});
      for (int64_t m = 0; m < rows; ++m) {
        double squares = 0;
        for (int64_t d = 0; d < dim; ++d) squares += (double)x.get(m * dim + d) * x.get(m * dim + d);
        const double factor = 1 / std::sqrt(squares / (double)dim + 1e-5);
        for (int64_t d = 0; d < dim; ++d) {
          const double want = x.get(m * dim + d) * factor * weight.get(d);
          const double tolerance = std::fabs(want) * (type == Type::kBF16 ? 1.0 / 128 : 1e-5);
          KVR_CHECK(std::fabs(y.get(m * dim + d) - want) <= tolerance, "dim %ld, row %ld, element %ld: %g, not %g",
                    (long)dim, (long)m, (long)d, y.get(m * dim + d), want);
        }
      }
    }
}

}  // namespace
}  // namespace kvreclaim::tests
