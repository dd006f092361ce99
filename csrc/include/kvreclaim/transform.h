// Keys or queries under a key transform (ops/key_transform.py): z = x * f + o, y = z + sum_r (z . u_r) v_r.
#pragma once

#include "kvreclaim/layout.h"

namespace kvreclaim {

// Heads kG ... kG + G - 1 of x and y belong to KV head k. D is a multiple of 8.
struct TransformArgs {
  RowsView x, y;                    // [T, KG, D] of one type; stride_d is 1
  const char *factor, *offset;      // f, o [K, D]; offset may be null
  const char *directions, *added;   // u, v [K, R, D]
  Type type;                        // of these four, which are contiguous
  int64_t num_tokens, kv_heads, group, dim, num_directions;  // T, K, G, D, R
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include <algorithm>
#include <cstring>

#include "kvreclaim/decode.h"
#include "kvreclaim/half.h"
#include "kvreclaim/memory.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS::transform_detail {

constexpr int64_t kItemElements = 16 * 1024;  // a smaller share is not worth a thread
constexpr int kTogether = 4;                  // directions that share the loads of a row

constexpr int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// A vector's worth of a row's numbers as they lie. Of the last one a half may be past the row: zeros.
template <Type T>
struct Lanes;
template <>
struct Lanes<Type::kF32> {
  typedef vf Raw;
  static KVR_INLINE vf widen(Raw x) { return x; }
  static KVR_INLINE Raw narrow(vf x) { return x; }
};
template <Type T>
struct Lanes {
  typedef uint16_t Raw __attribute__((vector_size(2 * kLanes)));
  static KVR_INLINE vf widen(Raw x) {
    const vu words = __builtin_convertvector(x, vu) << 16;
    return T == Type::kBF16 ? (vf)words : widen_f16(words);
  }
  static KVR_INLINE Raw narrow(vf x) {
    if constexpr (T == Type::kBF16) return __builtin_convertvector(round_bf16(x) >> 16, Raw);
    Raw made;
    for (int i = 0; i < kLanes; ++i) made[i] = to_f16(x[i]);
    return made;
  }
};

template <Type T>
KVR_INLINE vf load_lanes(const char* row, int64_t d, int64_t dims) {
  typename Lanes<T>::Raw raw{};
  if (d + kLanes <= dims)
    raw = load<typename Lanes<T>::Raw>(row + d * size_of(T));
  else
    __builtin_memcpy(&raw, row + d * size_of(T), sizeof(raw) / 2);
  return Lanes<T>::widen(raw);
}

template <Type T>
KVR_INLINE void store_lanes(char* row, int64_t d, int64_t dims, vf x) {
  const auto raw = Lanes<T>::narrow(x);
  if (d + kLanes <= dims) return store(row + d * size_of(T), raw);
  __builtin_memcpy(row + d * size_of(T), &raw, sizeof(raw) / 2);
}

// A KV head's constants in fp32, rows of `step` floats: zero past the dims and past the directions.
struct Head {
  int64_t step, directions;
  float *factor, *offset, *along, *added;
  float *row, *parts;  // z of the row at hand, and z . u

  explicit Head(const TransformArgs& a)
      : step(round_up(a.dim, kLanes)), directions(round_up(a.num_directions, kTogether)) {
    const int64_t size = (3 + 2 * directions) * step + directions;
    factor = thread_scratch(size);
    std::memset(factor, 0, (size_t)size * sizeof(float));
    offset = factor + step;
    along = offset + step;
    added = along + directions * step;
    row = added + directions * step;
    parts = row + step;
  }

  void open(const TransformArgs& a, int64_t head) {
    const int64_t row_bytes = a.dim * size_of(a.type), all_bytes = a.num_directions * row_bytes;
    const auto widen = [&](const char* from, int64_t count, float* to) {
      row_values((Format)a.type, from, a.dim, {count, 0, a.dim, to, step});
    };
    widen(a.factor + head * row_bytes, 1, factor);
    if (a.offset != nullptr) widen(a.offset + head * row_bytes, 1, offset);
    widen(a.directions + head * all_bytes, a.num_directions, along);
    widen(a.added + head * all_bytes, a.num_directions, added);
  }

  template <Type T>
  void transform_row(const char* x, char* y, int64_t dims) const {
    for (int64_t d = 0; d < step; d += kLanes)
      store(row + d, load_lanes<T>(x, d, dims) * load<vf>(factor + d) + load<vf>(offset + d));
    for (int64_t r = 0; r < directions; r += kTogether) {
      vf sum[kTogether] = {};
      for (int64_t d = 0; d < step; d += kLanes) {
        const vf z = load<vf>(row + d);
#pragma GCC unroll 4
        for (int i = 0; i < kTogether; ++i) sum[i] += z * load<vf>(along + (r + i) * step + d);
      }
      for (int i = 0; i < kTogether; ++i) parts[r + i] = hsum(sum[i]);
    }
    for (int64_t d = 0; d < step; d += kLanes) {
      vf z = load<vf>(row + d);
      for (int64_t r = 0; r < directions; r += kTogether)
#pragma GCC unroll 4
        for (int i = 0; i < kTogether; ++i) z += load<vf>(added + (r + i) * step + d) * parts[r + i];
      store_lanes<T>(y, d, dims, z);
    }
  }
};

template <Type T>
inline void transform_rows(const TransformArgs& a) {
  const int64_t heads = a.kv_heads * a.group;
  const int64_t share = std::max<int64_t>(1, kItemElements / std::max<int64_t>(1, heads * a.dim));
  parallel_for((a.num_tokens + share - 1) / share, [&](int64_t item) {
    const int64_t end = std::min((item + 1) * share, a.num_tokens);
    Head own(a);
    for (int64_t head = 0; head < heads; ++head) {
      if (head % a.group == 0) own.open(a, head / a.group);
      for (int64_t token = item * share; token < end; ++token)
        own.transform_row<T>(row_of(a.x, token, head), const_cast<char*>(row_of(a.y, token, head)), a.dim);
    }
  });
}

}  // namespace kvreclaim::KVR_NS::transform_detail

namespace kvreclaim::KVR_NS {

// In fp32, rounded once to nearest even. A row depends neither on the others nor on the number of threads.
inline void transform_rows(const TransformArgs& a) {
  switch (a.x.type) {
    case Type::kF32: return transform_detail::transform_rows<Type::kF32>(a);
    case Type::kBF16: return transform_detail::transform_rows<Type::kBF16>(a);
    case Type::kF16: return transform_detail::transform_rows<Type::kF16>(a);
  }
}

}  // namespace kvreclaim::KVR_NS
#endif
