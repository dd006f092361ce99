// A test is KVR_TEST(name) { ... } in any tests/*.cpp; main runs each once per instruction set and number of
// threads. Buffers are exactly as large as their contents, so that AddressSanitizer sees every step outside.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "kvreclaim/table.h"

namespace kvreclaim::tests {

struct Test {
  const char* name;
  void (*run)();
  Test* next;
  static Test*& first() {
    static Test* head = nullptr;
    return head;
  }
  Test(const char* name, void (*run)()) : name(name), run(run), next(first()) { first() = this; }
};

#define KVR_TEST(name)                                                      \
  static void name();                                                       \
  static const ::kvreclaim::tests::Test name##_registered(#name, &name);    \
  static void name()

#define KVR_CHECK(condition, ...)                                     \
  do {                                                                \
    if (!(condition)) {                                               \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                              \
      std::fprintf(stderr, "\n");                                     \
      std::exit(1);                                                   \
    }                                                                 \
  } while (0)

// Reproducible numbers in [-1, 1).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435769u + 1) {}
  uint64_t bits() {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return state_;
  }
  float uniform() { return (float)((double)(bits() >> 11) / (double)(1ull << 52) - 1.0); }
  int64_t below(int64_t n) { return (int64_t)(bits() % (uint64_t)n); }

 private:
  uint64_t state_;
};

inline uint16_t round_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float widen(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float widen_f16(uint16_t x) {
  const int exponent = x >> 10 & 31, mantissa = x & 1023;
  const double size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                      : exponent     ? std::ldexp(1024 + mantissa, exponent - 25)
                                     : std::ldexp(mantissa, -24);
  return (float)(x & 0x8000 ? -size : size);
}

// Of those next to x the nearest, the even one of two; |x| < 65520.
inline uint16_t round_f16(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  uint16_t low = 0, high = 0x7c00;
  while (high - low > 1) {
    const uint16_t middle = (uint16_t)((low + high) / 2);
    (widen_f16(middle) <= std::fabs(x) ? low : high) = middle;
  }
  const double below = std::fabs((double)x) - widen_f16(low), above = widen_f16(high) - std::fabs((double)x);
  return sign | (below < above || (below == above && low % 2 == 0) ? low : high);
}

// Numbers stored as fp32, bf16 or fp16, read and written as float.
class Numbers {
 public:
  Numbers(Type type, int64_t count, float fill = std::numeric_limits<float>::quiet_NaN())
      : type_(type), bytes_(count * size_of(type)) {
    for (int64_t i = 0; i < count; ++i) set(i, fill);
  }
  Type type() const { return type_; }
  char* data() { return bytes_.data(); }
  int64_t count() const { return (int64_t)bytes_.size() / size_of(type_); }
  float get(int64_t i) const {
    if (type_ != Type::kF32) {
      uint16_t x;
      std::memcpy(&x, bytes_.data() + 2 * i, 2);
      return type_ == Type::kBF16 ? widen(x) : widen_f16(x);
    }
    float x;
    std::memcpy(&x, bytes_.data() + 4 * i, 4);
    return x;
  }
  void set(int64_t i, float value) {
    if (type_ == Type::kF32) {
      std::memcpy(bytes_.data() + 4 * i, &value, 4);
      return;
    }
    const bool nan = value != value;
    const uint16_t not_a_number = type_ == Type::kBF16 ? 0x7fc0 : 0x7e00;
    const uint16_t narrow = nan ? not_a_number : type_ == Type::kBF16 ? round_bf16(value) : round_f16(value);
    std::memcpy(bytes_.data() + 2 * i, &narrow, 2);
  }
  void randomise(Random& random) {
    for (int64_t i = 0; i < count(); ++i) set(i, random.uniform());
  }

 private:
  Type type_;
  std::vector<char> bytes_;
};

inline RowsView rows_of(Numbers& x, int64_t heads, int64_t dims) {
  return {x.data(), heads * dims, dims, 1, x.type()};
}

}  // namespace kvreclaim::tests
