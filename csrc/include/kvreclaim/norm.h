// Root-mean-square norm of each row: y = weight * round(x / sqrt(mean(x^2) + eps)), rounded to the type of x
// before and after the weight, as Llama and its relatives do; rms_norm_from_one: times 1 + weight, rounded once, as
// Gemma and Qwen3-Next do.
#pragma once

#include <cstdint>

#include "kvreclaim/layout.h"

namespace kvreclaim {

// x, y [M, D] contiguous, weight [D]; all of one type.
struct RmsNormArgs {
  const char* x;
  const char* weight;
  char* y;
  int64_t rows, dim;  // M, D
  float eps;
  Type type;
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include <algorithm>
#include <cmath>

#include "kvreclaim/simd.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS::norm_detail {

constexpr int64_t kItemElements = 16 * 1024;  // a smaller share is not worth a thread

// Two vectors of fp32 from kStep elements; of bf16 the even and the odd ones.
template <Type T>
constexpr int64_t kStepBytes = 2 * kLanes * (T == Type::kBF16 ? 2 : 4);

struct Pair {
  vf a, b;
};

template <Type T>
KVR_INLINE Pair widen(const char* p) {
  if constexpr (T == Type::kF32) return {load<vf>(p), load<vf>(p + sizeof(vf))};
  const vu words = load<vu>(p);
  return {even(words), odd(words)};
}

template <Type T>
KVR_INLINE void narrow(char* p, Pair x) {
  if constexpr (T == Type::kF32) {
    store(p, x.a);
    store(p + sizeof(vf), x.b);
  } else {
    store(p, pack_pairs(x.a, x.b));
  }
}

template <Type T>
KVR_INLINE vf rounded(vf x) {
  return T == Type::kF32 ? x : (vf)round_bf16(x);
}

template <Type T, bool kFromOne>
KVR_INLINE void scale_step(const char* x, const char* weight, char* y, vf factor) {
  const Pair values = widen<T>(x), weights = widen<T>(weight);
  if constexpr (kFromOne) {
    const vf one = splat(1.0f);
    return narrow<T>(y, {values.a * factor * (one + weights.a), values.b * factor * (one + weights.b)});
  }
  narrow<T>(y, {weights.a * rounded<T>(values.a * factor), weights.b * rounded<T>(values.b * factor)});
}

template <Type T, bool kFromOne = false>
inline void norm_row(const RmsNormArgs& a, int64_t row) {
  constexpr int64_t kBytes = kStepBytes<T>;
  const int64_t bytes = a.dim * size_of(T), whole = bytes / kBytes * kBytes, rest = bytes - whole;
  const char* x = a.x + row * bytes;
  char* y = a.y + row * bytes;
  char tail[kBytes] = {}, tail_weight[kBytes] = {};
  __builtin_memcpy(tail, x + whole, (size_t)rest);
  __builtin_memcpy(tail_weight, a.weight + whole, (size_t)rest);
  vf squares_a{}, squares_b{};
  const auto add = [&](const char* at) {
    const Pair values = widen<T>(at);
    squares_a += values.a * values.a;
    squares_b += values.b * values.b;
  };
  for (int64_t i = 0; i < whole; i += kBytes) add(x + i);
  add(tail);
  const vf factor = splat(1.0f / std::sqrt(hsum(squares_a + squares_b) / (float)a.dim + a.eps));
  for (int64_t i = 0; i < whole; i += kBytes) scale_step<T, kFromOne>(x + i, a.weight + i, y + i, factor);
  scale_step<T, kFromOne>(tail, tail_weight, tail, factor);
  __builtin_memcpy(y + whole, tail, (size_t)rest);
}

template <bool kFromOne>
inline void norm_rows(const RmsNormArgs& a) {
  const int64_t share = std::max<int64_t>(1, kItemElements / std::max<int64_t>(a.dim, 1));
  parallel_for((a.rows + share - 1) / share, [&](int64_t item) {
    const int64_t end = std::min((item + 1) * share, a.rows);
    for (int64_t row = item * share; row < end; ++row)
      if (a.type == Type::kBF16)
        norm_row<Type::kBF16, kFromOne>(a, row);
      else
        norm_row<Type::kF32, kFromOne>(a, row);
  });
}

}  // namespace kvreclaim::KVR_NS::norm_detail

namespace kvreclaim::KVR_NS {

inline void rms_norm(const RmsNormArgs& a) { norm_detail::norm_rows<false>(a); }
inline void rms_norm_from_one(const RmsNormArgs& a) { norm_detail::norm_rows<true>(a); }

}  // namespace kvreclaim::KVR_NS
#endif
