// What a key transform does along its directions u_r (ops/key_transform.py): y = x + sum_r (x . u_r) v_r.
#pragma once

#include <cstdint>

#include "kvreclaim/layout.h"

namespace kvreclaim {

// x, y [T, K, G, D], u, v [K, R, D]; all contiguous, of one type. D <= kMaxStretchDim.
struct StretchArgs {
  const char *x, *u, *v;
  char* y;
  int64_t tokens, heads, group, dim, directions;  // T, K, G, D, R
  Type type;
};

constexpr int64_t kMaxStretchDim = 1024;

}  // namespace kvreclaim

#ifdef KVR_NS
#include <algorithm>
#include <type_traits>

#include "kvreclaim/simd.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS::stretch_detail {

constexpr int64_t kItemElements = 16 * 1024;  // a smaller share is not worth a thread

template <Type T>
using Stored = std::conditional_t<T == Type::kBF16, uint16_t, float>;

template <Type T>
KVR_INLINE float widened(Stored<T> x) {
  if constexpr (T == Type::kF32) return x;
  return __builtin_bit_cast(float, (uint32_t)x << 16);
}

template <Type T>
KVR_INLINE Stored<T> narrowed(float x) {
  if constexpr (T == Type::kF32) return x;
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <Type T>
inline void stretch_row(const StretchArgs& a, int64_t head, int64_t row) {
  const Stored<T>* x = (const Stored<T>*)a.x + row * a.dim;
  Stored<T>* y = (Stored<T>*)a.y + row * a.dim;
  float sum[kMaxStretchDim];
  for (int64_t d = 0; d < a.dim; ++d) sum[d] = widened<T>(x[d]);
  for (int64_t r = 0; r < a.directions; ++r) {
    const int64_t first = (head * a.directions + r) * a.dim;
    const Stored<T>*u = (const Stored<T>*)a.u + first, *v = (const Stored<T>*)a.v + first;
    float part[16] = {};
    int64_t d = 0;
    for (; d + 16 <= a.dim; d += 16)
      for (int i = 0; i < 16; ++i) part[i] += widened<T>(x[d + i]) * widened<T>(u[d + i]);
    for (; d < a.dim; ++d) part[0] += widened<T>(x[d]) * widened<T>(u[d]);
    for (int step = 8; step > 0; step /= 2)
      for (int i = 0; i < step; ++i) part[i] += part[i + step];
    for (d = 0; d < a.dim; ++d) sum[d] += part[0] * widened<T>(v[d]);
  }
  for (int64_t d = 0; d < a.dim; ++d) y[d] = narrowed<T>(sum[d]);
}

template <Type T>
inline void stretch_rows(const StretchArgs& a) {
  const int64_t rows = a.tokens * a.heads * a.group, share = std::max<int64_t>(1, kItemElements / a.dim);
  parallel_for((rows + share - 1) / share, [&](int64_t item) {
    const int64_t end = std::min((item + 1) * share, rows);
    for (int64_t row = item * share; row < end; ++row) stretch_row<T>(a, row / a.group % a.heads, row);
  });
}

}  // namespace kvreclaim::KVR_NS::stretch_detail

namespace kvreclaim::KVR_NS {

inline void stretch(const StretchArgs& a) {
  if (a.type == Type::kBF16)
    stretch_detail::stretch_rows<Type::kBF16>(a);
  else
    stretch_detail::stretch_rows<Type::kF32>(a);
}

}  // namespace kvreclaim::KVR_NS
#endif
