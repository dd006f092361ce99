// Query rows of one KV head: where they lie in [T, H, D], packed for the tile loops, and written back.
#pragma once

#include <cstring>

#include "kvreclaim/attention_args.h"
#include "kvreclaim/half.h"
#include "kvreclaim/rotate.h"
#include "kvreclaim/simd.h"
#include "kvreclaim/tile.h"

namespace kvreclaim::KVR_NS {

// Row r of a KV head is query r / members, head first_head + r % members.
struct RowMap {
  int64_t first_row, first_head, members, sequence;  // sequence: its number in the batch
};

KVR_INLINE RowMap row_map(const SequenceView& seq, int64_t head, int64_t members) {
  return {seq.first_row, head * members, members, seq.index};
}

KVR_INLINE char* row_address(const RowsView& x, const RowMap& map, int64_t r) {
  const int64_t t = map.first_row + r / map.members, h = map.first_head + r % map.members;
  return x.data + (t * x.stride_t + h * x.stride_h) * size_of(x.type);
}

KVR_INLINE float from_16(Type type, uint16_t bits) { return type == Type::kBF16 ? from_bf16(bits) : from_f16(bits); }

// One row of x as fp32 times scale, `step` floats apart.
inline void unpack_row(const RowsView& x, const char* from, int64_t dims, float scale, float* to, int64_t step) {
  if (x.type == Type::kF32) {
    for (int64_t d = 0; d < dims; ++d) to[d * step] = reinterpret_cast<const float*>(from)[d * x.stride_d] * scale;
  } else if (x.stride_d != 1 || x.type == Type::kF16) {
    const uint16_t* row = reinterpret_cast<const uint16_t*>(from);
    for (int64_t d = 0; d < dims; ++d) to[d * step] = scale * from_16(x.type, row[d * x.stride_d]);
  } else {
    for (int64_t d = 0; d < dims; d += 2) {
      const uint32_t word = load<uint32_t>(from + 2 * d);
      to[d * step] = load_bits(word << 16) * scale;
      to[(d + 1) * step] = load_bits(word & 0xffff0000u) * scale;
    }
  }
}

// Turns a query as the keys of a rotated cache were turned when they were written.
inline void rotate_query(const CacheView& c, float* row) {
  if (c.latent && is_rotated(c.formats.v)) rotate_row(c.v_signs, c.v_dim, row);
  if (is_rotated(c.formats.k)) rotate_row(c.k_signs, c.k_dim, c.latent ? row + c.v_dim : row);
}

// `spare` holds a row.
inline void load_queries(const RowsView& q, const CacheView& c, const RowMap& map, int64_t row, float scale,
                         RowGroup& group, float* spare) {
  const int64_t dims = head_dim(c);
  const bool turns = is_rotated(c.formats.k) || (c.latent && is_rotated(c.formats.v));
  for (int64_t r = 0; r < group.count; ++r) {
    const char* from = row_address(q, map, row + r);
    if (!turns) {
      unpack_row(q, from, dims, scale, group.q + r, group.count);
      continue;
    }
    unpack_row(q, from, dims, scale, spare, 1);
    rotate_query(c, spare);
    for (int64_t d = 0; d < dims; ++d) group.q[d * group.count + r] = spare[d];
  }
}

inline void reset(RowGroup& group, int64_t v_dims) {
  std::memset(group.acc, 0, group.count * v_dims * sizeof(float));
  group.m = splat<Vec<kMaxR>::F>(kNegInf);
  for (int64_t r = 0; r < group.count; ++r) group.sum[r] = vf{};
}

// What one row has summed: sum_t 2^(s_t - m) V_t and its weight.
struct Sums {
  float m, weight;
  float* acc;
};

KVR_INLINE float exp2_scalar(float x) { return exp2v(Vec<4>::F{} + x)[0]; }

// Adds another part of the same row's keys. Parts of which it sees nothing leave no trace.
inline void merge(Sums& into, const Sums& part, int64_t v_dims) {
  if (part.m == kNegInf) return;
  if (into.m == kNegInf) {
    std::memcpy(into.acc, part.acc, v_dims * sizeof(float));
    into.m = part.m, into.weight = part.weight;
    return;
  }
  const float m = into.m > part.m ? into.m : part.m;
  const float a = exp2_scalar(into.m - m), b = exp2_scalar(part.m - m);
  for (int64_t d = 0; d < v_dims; ++d) into.acc[d] = into.acc[d] * a + part.acc[d] * b;
  into.weight = into.weight * a + part.weight * b;
  into.m = m;
}

// acc's order of dims (tile_values') -> out's dims, times factor, for a contiguous row.
template <int N>
inline void write_dims(const float* acc, float factor, int64_t dims, bool pairs, bool narrow, char* to,
                       int64_t d = 0) {
  using F = typename Vec<N>::F;
  for (; d + 2 * N <= dims; d += 2 * N) {
    const F first = load<F>(acc + d) * factor, second = load<F>(acc + d + N) * factor;
    if (pairs && narrow) {
      store(to + 2 * d, pack_pairs(first, second));
    } else if (pairs) {
      float* row = reinterpret_cast<float*>(to) + d;
      for (int i = 0; i < N; ++i) row[2 * i] = first[i], row[2 * i + 1] = second[i];
    } else if (narrow) {
      uint16_t* row = reinterpret_cast<uint16_t*>(to) + d;
      for (int i = 0; i < N; ++i) row[i] = to_bf16(first[i]), row[N + i] = to_bf16(second[i]);
    } else {
      store(to + 4 * d, first);
      store(to + 4 * (d + N), second);
    }
  }
  if constexpr (N > 4) {
    if (d < dims) write_dims<N / 2>(acc, factor, dims, pairs, narrow, to, d);
  }
}

// The row's attention output; a sink joins the denominator. May change sums.acc.
template <class Args>
inline void write_row(const Args& a, const RowMap& map, int64_t r, const Sums& sums) {
  float weight = sums.weight, factor = 1.0f;
  if (a.sinks != nullptr) {
    const int64_t head = map.sequence * a.num_heads + map.first_head + r % map.members;
    const float sink = a.sinks[head % a.num_sinks] * kLog2e;
    const float m = sums.m > sink ? sums.m : sink;
    factor = exp2_scalar(sums.m - m);
    weight = weight * factor + exp2_scalar(sink - m);
  }
  factor = weight == 0.0f ? 0.0f : factor / weight;
  const CacheView& c = a.cache;
  char* to = row_address(a.out, map, r);
  if (is_rotated(c.formats.v)) unrotate_row(c.v_signs, c.v_dim, sums.acc);
  const bool pairs = c.formats.k == Format::kBF16 && !c.latent;
  if (a.out.type == Type::kF16) {
    write_dims<kLanes>(sums.acc, factor, c.v_dim, pairs, false, reinterpret_cast<char*>(sums.acc));
    for (int64_t d = 0; d < c.v_dim; ++d) store(to + 2 * d, to_f16(sums.acc[d]));
    return;
  }
  write_dims<kLanes>(sums.acc, factor, c.v_dim, pairs, a.out.type == Type::kBF16, to);
}

inline void zero_row(const RowsView& out, int64_t t, int64_t heads, int64_t dims) {
  for (int64_t h = 0; h < heads; ++h)
    std::memset(out.data + (t * out.stride_t + h * out.stride_h) * size_of(out.type), 0, dims * size_of(out.type));
}

}  // namespace kvreclaim::KVR_NS
