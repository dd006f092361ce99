// Recurrent layers on odd shapes against loops in double, by the loops for steps and by those for prompts; slots that are not written stay as they are.
#include <vector>

#include "harness.h"

namespace kvreclaim::tests {
namespace {

const int64_t kOne[] = {0, 1};  // one sequence of one token

double silu(double x) { return x / (1 + std::exp(-x)); }

// fp32 numbers of a state or vector, of size about 1.
std::vector<float> floats(int64_t count, Random& random) {
  Numbers drawn(Type::kF32, count);
  drawn.randomise(random);
  std::vector<float> found;
  for (int64_t i = 0; i < count; ++i) found.push_back((float)drawn.get(i));
  return found;
}

void check_short_conv(Type type, int64_t channels, int64_t width, int64_t kept, bool decode, Random& random) {
  const int64_t slots = 3, read[] = {2}, write[] = {0};
  Numbers row(type, 3 * channels), weight(type, channels * width), conv(type, slots * channels * kept);
  Numbers before(type, slots * channels * kept), out(type, channels);
  row.randomise(random);
  weight.randomise(random);
  conv.randomise(random);
  std::memcpy(before.data(), conv.data(), (size_t)(slots * channels * kept * size_of(type)));
  const StepRows step{row.data(), out.data(), kOne, read, write, 1, 1, 3 * channels, type, decode};
  kernels().short_conv_step({step, {nullptr, weight.data(), nullptr, conv.data(), 0, channels, width, kept},
                             0, channels, 2 * channels});
  const double share = type == Type::kBF16 ? 1.0 / 32 : 1e-5;
  for (int64_t c = 0; c < channels; ++c) {
    double sum = weight.get(c * width + width - 1) * row.get(c) * row.get(2 * channels + c), size = std::fabs(sum);
    for (int64_t j = 0; j + 1 < width; ++j) {
      const double term = weight.get(c * width + j) * before.get((2 * channels + c) * kept + kept - width + 1 + j);
      sum += term, size += std::fabs(term);
    }
    const double gate = row.get(channels + c);
    KVR_CHECK(std::fabs(out.get(c) - gate * sum) <= share * (1e-3 + std::fabs(gate) * size), "%ld channels, %ld: %g, not %g",
              (long)channels, (long)c, out.get(c), gate * sum);
    for (int64_t j = 0; j + 1 < kept; ++j)
      KVR_CHECK(conv.get(c * kept + j) == before.get((2 * channels + c) * kept + j + 1), "state %ld", (long)c);
  }
  const int64_t slot = channels * kept * size_of(type);
  KVR_CHECK(std::memcmp(conv.data() + slot, before.data() + slot, (size_t)(2 * slot)) == 0, "another slot was written%s", "");
}

KVR_TEST(short_conv_step_on_odd_shapes) {
  Random random(11);
  for (Type type : {Type::kBF16, Type::kF32})
    for (int64_t channels : {1, 37, 256, 300}) {
      for (bool decode : {true, false}) {
        check_short_conv(type, channels, 3, 3, decode, random);
        check_short_conv(type, channels, 4, 5, decode, random);
      }
    }
}

// One head whose convolution passes the newest input on: x, B, C; z, dt.
KVR_TEST(ssd_step_of_one_head) {
  Random random(12);
  for (bool decode : {true, false})
    for (int64_t dim : {1, 19})
      for (int64_t size : {1, 33}) {
        const int64_t channels = dim + 2 * size, slots = 2, read[] = {1}, write[] = {0}, piece[] = {dim, 0, channels};
        Numbers row(Type::kF32, dim + channels + 1), weight(Type::kF32, channels), conv(Type::kF32, slots * channels);
        Numbers out(Type::kF32, dim);
        row.randomise(random);
        conv.randomise(random);
        for (int64_t c = 0; c < channels; ++c) weight.set(c, 1.0f);
        std::vector<float> states = floats(slots * dim * size, random), before = states;
        const float a = -0.5f, d = 0.7f, dt_bias = 0.3f;
        const StepRows step{row.data(), out.data(), kOne, read, write, 1, 1, dim + channels + 1, Type::kF32, decode};
        kernels().ssd_step({step, {piece, weight.data(), nullptr, conv.data(), 1, channels, 1, 1}, states.data(), &a, &d,
                            &dt_bias, nullptr, 1, dim, 1, size, 1, 0, dim + channels, 0.0f, 0.0f, 1e9f, false});
        const double dt = std::log1p(std::exp(row.get(dim + channels) + dt_bias));
        for (int64_t p = 0; p < dim; ++p) {
          const double x = silu(row.get(dim + p));
          double y = d * x;
          for (int64_t n = 0; n < size; ++n) {
            const double b = silu(row.get(2 * dim + n)), c = silu(row.get(2 * dim + size + n));
            const double state = before[(size_t)((dim + p) * size + n)] * std::exp(dt * a) + dt * x * b;
            KVR_CHECK(std::fabs(states[(size_t)(p * size + n)] - state) <= 1e-5 * (1 + std::fabs(state)), "state %ld", (long)n);
            y += state * c;
          }
          y *= silu(row.get(p));
          KVR_CHECK(std::fabs(out.get(p) - y) <= 1e-4 * (1 + std::fabs(y)), "output %ld: %g, not %g", (long)p, out.get(p), y);
        }
      }
}

// One head whose convolution passes the newest input on: q, k, v; z, b, a.
KVR_TEST(delta_step_of_one_head) {
  Random random(13);
  for (bool decode : {true, false})
    for (int64_t k_dim : {1, 17})
      for (int64_t v_dim : {1, 37}) {
        const int64_t channels = 2 * k_dim + v_dim, slots = 2, read[] = {0}, write[] = {1}, piece[] = {0, 0, channels};
        const int64_t places[] = {channels, channels + v_dim, channels + v_dim + 1};
        Numbers row(Type::kF32, channels + v_dim + 2), weight(Type::kF32, channels), conv(Type::kF32, slots * channels);
        Numbers norm(Type::kF32, v_dim), out(Type::kF32, v_dim);
        row.randomise(random);
        norm.randomise(random);
        conv.randomise(random);
        for (int64_t c = 0; c < channels; ++c) weight.set(c, 1.0f);
        std::vector<float> states = floats(slots * k_dim * v_dim, random), before = states;
        const float decay = -0.5f, dt_bias = 0.3f;
        const StepRows step{row.data(), out.data(), kOne, read, write, 1, 1, channels + v_dim + 2, Type::kF32, decode};
        kernels().delta_step({step, {piece, weight.data(), nullptr, conv.data(), 1, channels, 1, 1}, states.data(), places,
                              &decay, &dt_bias, norm.data(), 1, 1, k_dim, v_dim, 1e-6f});
        double q_size = 1e-6, k_size = 1e-6, squares = 0;
        for (int64_t d = 0; d < k_dim; ++d) {
          q_size += std::pow(silu(row.get(d)), 2);
          k_size += std::pow(silu(row.get(k_dim + d)), 2);
        }
        const double beta = 1 / (1 + std::exp(-row.get(channels + v_dim)));
        const double keep = std::exp(decay * std::log1p(std::exp(row.get(channels + v_dim + 1) + dt_bias)));
        std::vector<double> y;
        for (int64_t i = 0; i < v_dim; ++i) {
          double known = 0, sum = 0;
          for (int64_t d = 0; d < k_dim; ++d)
            known += keep * before[(size_t)(d * v_dim + i)] * silu(row.get(k_dim + d)) / std::sqrt(k_size);
          const double delta = beta * (silu(row.get(2 * k_dim + i)) - known);
          for (int64_t d = 0; d < k_dim; ++d) {
            const double state =
                keep * before[(size_t)(d * v_dim + i)] + silu(row.get(k_dim + d)) / std::sqrt(k_size) * delta;
            KVR_CHECK(std::fabs(states[(size_t)((k_dim + d) * v_dim + i)] - state) <= 1e-5 * (1 + std::fabs(state)),
                      "state %ld", (long)d);
            sum += state * silu(row.get(d)) / std::sqrt(q_size * (double)k_dim);
          }
          y.push_back(sum);
          squares += sum * sum;
        }
        for (int64_t i = 0; i < v_dim; ++i) {
          const double want =
              y[(size_t)i] / std::sqrt(squares / (double)v_dim + 1e-6) * norm.get(i) * silu(row.get(channels + i));
          KVR_CHECK(std::fabs(out.get(i) - want) <= 1e-3 * (1 + std::fabs(want)), "output %ld: %g, not %g", (long)i,
                    out.get(i), want);
        }
      }
}

// Two tokens of a sequence behind a state, whose last one is kept, too, and one that begins.
KVR_TEST(selective_scan_on_odd_shapes) {
  Random random(14);
  for (Type type : {Type::kBF16, Type::kF32})
    for (int64_t channels : {1, 37, 130})
      for (int64_t size : {1, 17}) {
        const int64_t tokens = 3, slots = 4, starts[] = {0, 2, 3}, read[] = {3, -1}, write[] = {0, 1, 2};
        Numbers x(type, tokens * channels), dt(type, tokens * channels), z(type, tokens * channels);
        Numbers bc(type, tokens * 2 * size), out(type, tokens * channels);
        for (Numbers* each : {&x, &dt, &z, &bc}) each->randomise(random);
        std::vector<float> states = floats(slots * channels * size, random), before = states;
        std::vector<float> a = floats(size * channels, random), d = floats(channels, random);
        for (float& each : a) each = -std::fabs(each);
        const StepRows step{x.data(), out.data(), starts, read, write, 2, tokens, channels, type, false};
        kernels().selective_scan({step, dt.data(), z.data(), bc.data(), channels, channels, 2 * size, states.data(),
                                  a.data(), d.data(), nullptr, nullptr, channels, size, 0.0f});
        const double share = type == Type::kBF16 ? 1.0 / 64 : 1e-5;
        for (int64_t c = 0; c < channels; ++c)
          for (int64_t t = 0; t < tokens; ++t) {
            const double step_size = std::log1p(std::exp(dt.get(t * channels + c))), in = x.get(t * channels + c);
            double y = 0, most = 1;
            for (int64_t n = 0; n < size; ++n) {
              const int64_t place = c * size + n;
              const double old = t == 0   ? before[(size_t)(3 * channels * size + place)]
                                 : t == 1 ? states[(size_t)place]
                                          : 0;
              const double added = step_size * in * bc.get(2 * t * size + n);
              const double state = old * std::exp2(step_size * a[(size_t)(n * channels + c)]) + added;
              KVR_CHECK(std::fabs(states[(size_t)(t * channels * size + place)] - state) <=
                            share * (1 + std::fabs(old) + std::fabs(added)),
                        "state %ld of token %ld", (long)n, (long)t);
              y += state * bc.get(2 * t * size + size + n), most += std::fabs(state);
            }
            y = (y + d[(size_t)c] * in) * silu(z.get(t * channels + c));
            KVR_CHECK(std::fabs(out.get(t * channels + c) - y) <= share * most, "output %ld: %g, not %g", (long)c,
                      out.get(t * channels + c), y);
          }
        const size_t other = (size_t)(3 * channels * size);
        KVR_CHECK(std::memcmp(states.data() + other, before.data() + other, (size_t)(channels * size) * 4) == 0,
                  "the slot that is read was written%s", "");
      }
}

}  // namespace
}  // namespace kvreclaim::tests
