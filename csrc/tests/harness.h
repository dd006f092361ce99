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

// Numbers stored as fp32 or bf16, read and written as float.
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
    if (type_ == Type::kBF16) {
      uint16_t x;
      std::memcpy(&x, bytes_.data() + 2 * i, 2);
      return widen(x);
    }
    float x;
    std::memcpy(&x, bytes_.data() + 4 * i, 4);
    return x;
  }
  void set(int64_t i, float value) {
    const uint16_t narrow = value != value ? 0x7fc0 : round_bf16(value);
    if (type_ == Type::kBF16)
      std::memcpy(bytes_.data() + 2 * i, &narrow, 2);
    else
      std::memcpy(bytes_.data() + 4 * i, &value, 4);
  }
  void randomise(Random& random) {
    for (int64_t i = 0; i < count(); ++i) set(i, random.uniform());
  }

 private:
  Type type_;
  std::vector<char> bytes_;
};

// A cache full of NaN with its own bytes; element access by the definition in layout.h.
struct TestCache {
  Numbers k, v;
  CacheView view;
  TestCache(Type type, int64_t layers, int64_t blocks, int64_t heads, int64_t size, int64_t k_dim, int64_t v_dim)
      : k(type, layers * blocks * heads * size * k_dim),
        v(type, layers * blocks * heads * size * v_dim),
        view{nullptr, k.data(), v.data(), layers, blocks, heads, size, k_dim, v_dim, (Format)type, false, nullptr,
             nullptr, nullptr, nullptr, nullptr, 0, 0, 0, 0} {}
  int64_t k_index(int64_t layer, int64_t block, int64_t head, int64_t s, int64_t d) const {
    const int64_t size = view.block_size, first = ((layer * view.blocks + block) * view.heads + head) * size * view.k_dim;
    return first + (view.format == Format::kBF16 ? ((d / 2) * size + s) * 2 + d % 2 : d * size + s);
  }
  int64_t v_index(int64_t layer, int64_t block, int64_t head, int64_t s, int64_t d) const {
    return (((layer * view.blocks + block) * view.heads + head) * view.block_size + s) * view.v_dim + d;
  }
};

inline RowsView rows_of(Numbers& x, int64_t heads, int64_t dims) {
  return {x.data(), heads * dims, dims, 1, x.type()};
}

}  // namespace kvreclaim::tests
