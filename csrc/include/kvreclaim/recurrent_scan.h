// Many tokens of one head through a state [rows, columns], a block of columns at a time, which stays in the first cache.
// The state is held undecayed, times one factor, so that decay is no work of its own; the change by a token is made in
// the pass that reads the state for the next one.
#pragma once

#include "kvreclaim/recurrent_rows.h"

namespace kvreclaim::KVR_NS::recurrent_detail {

constexpr int kVectors = kRegisters >= 32 ? 2 : 4;
constexpr int64_t kColumns = kVectors * kLanes;
constexpr float kLeastFactor = 0x1p-30f;  // below, the state is multiplied by it

// Of one token: e^g; what its change is multiplied by (beta, dt); q k.
struct Gate {
  float keep, by, qk;
};

// A block of one head for a piece: k, q [count, rows], `stride` floats from token to token, v alike; gates `gate_stride`
// apart.
struct Scan {
  const float *k, *q, *v;
  const Gate* gates;
  int64_t stride, gate_stride, rows, columns;
  bool transposed;      // states are [columns, rows], not [rows, columns]
  int64_t state_stride;  // floats from row to row, or from column to column
};

// 4 x 4 numbers at a time.
inline void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t columns) {
  using F = Vec<4>::F;
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    int64_t c = 0;
    for (; c + 4 <= columns; c += 4) {
      F x[4], y[4];
      for (int i = 0; i < 4; ++i) x[i] = load<F>(from + (r + i) * from_stride + c);
      for (int i = 0; i < 2; ++i) {
        y[i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 0, 4, 1, 5);
        y[i + 2] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 2, 6, 3, 7);
      }
      for (int i = 0; i < 2; ++i) {
        store(to + (c + 2 * i) * to_stride + r, __builtin_shufflevector(y[2 * i], y[2 * i + 1], 0, 1, 4, 5));
        store(to + (c + 2 * i + 1) * to_stride + r, __builtin_shufflevector(y[2 * i], y[2 * i + 1], 2, 3, 6, 7));
      }
    }
    for (; c < columns; ++c)
      for (int i = 0; i < 4; ++i) to[c * to_stride + r + i] = from[(r + i) * from_stride + c];
  }
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
}

struct Sums {
  vf by_k[kVectors], by_q[kVectors];
};

// state += before * change, times by if kScaled; the products of what is then there with k and q. columns: kColumns.
template <bool kDelta, bool kScaled>
KVR_KERNEL void change_and_read(float* state, int64_t rows, const float* before, const vf* change, float by, const float* k,
                                const float* q, Sums& sums) {
  vf by_k[kVectors] = {}, by_q[kVectors] = {}, add[kVectors];
  for (int j = 0; j < kVectors; ++j) add[j] = change[j];
  for (int64_t d = 0; d < rows; ++d) {
    float* row = state + d * kColumns;
    const vf old = splat(before[d]), to_k = splat(kDelta ? k[d] : 0.0f), to_q = splat(q[d]);
    for (int j = 0; j < kVectors; ++j) {
      vf x = load<vf>(row + j * kLanes) + old * add[j];
      if constexpr (kScaled) x *= splat(by);
      store(row + j * kLanes, x);
      if constexpr (kDelta) by_k[j] += x * to_k;
      by_q[j] += x * to_q;
    }
  }
  for (int j = 0; j < kVectors; ++j) sums.by_k[j] = by_k[j], sums.by_q[j] = by_q[j];
}

// from null: zeros. write(t): where the state behind token t goes, or null; the last one goes to carry, too, unless that
// is null. out(t, v, y) takes the block's values and results.
template <bool kDelta, class Write, class Out>
inline void scan(const Scan& a, int64_t count, const float* from, float* carry, const Write& write, const Out& out) {
  float *state = thread_scratch(2 * a.rows * kColumns), *copy = state + a.rows * kColumns;
  std::fill_n(state, a.rows * kColumns, 0.0f);
  if (from != nullptr) {
    if (a.transposed)
      transpose(from, a.state_stride, state, kColumns, a.columns, a.rows);
    else
      for (int64_t d = 0; d < a.rows; ++d) std::copy_n(from + d * a.state_stride, a.columns, state + d * kColumns);
  }
  vf change[kVectors] = {}, v[kVectors] = {}, y[kVectors];
  const float* before = a.k;
  float factor = 1.0f;
  const auto keep = [&](float* to) {
    for (int64_t d = 0; d < a.rows; ++d)
      for (int j = 0; j < kVectors; ++j) {
        const int64_t place = d * kColumns + j * kLanes;
        store(copy + place, (load<vf>(state + place) + splat(before[d]) * change[j]) * splat(factor));
      }
    if (a.transposed)
      transpose(copy, kColumns, to, a.state_stride, a.rows, a.columns);
    else
      for (int64_t d = 0; d < a.rows; ++d) std::copy_n(copy + d * kColumns, a.columns, to + d * a.state_stride);
  };
  Sums sums;
  for (int64_t t = 0; t < count; ++t) {
    const Gate& gate = a.gates[t * a.gate_stride];
    const float *k = a.k + t * a.stride, *q = a.q + t * a.stride;
    factor *= gate.keep;
    const bool scales = factor < kLeastFactor;
    if (scales)
      change_and_read<kDelta, true>(state, a.rows, before, change, factor, k, q, sums);
    else
      change_and_read<kDelta, false>(state, a.rows, before, change, 1.0f, k, q, sums);
    if (scales) factor = 1.0f;
    __builtin_memcpy(v, a.v + t * a.stride, (size_t)(4 * a.columns));
    const float inverse = 1.0f / factor;
    for (int j = 0; j < kVectors; ++j) {
      const vf delta = kDelta ? (v[j] - sums.by_k[j] * splat(factor)) * splat(gate.by) : v[j] * splat(gate.by);
      y[j] = sums.by_q[j] * splat(factor) + delta * splat(gate.qk);
      change[j] = delta * splat(inverse);
    }
    before = k;
    out(t, v, y);
    if (float* to = write(t); to != nullptr) keep(to);
  }
  if (carry != nullptr) keep(carry);
}

// All heads of all pieces: body(piece, head, first column, columns).
template <class Body>
inline void for_each_block(const std::vector<Piece>& pieces, int64_t heads, int64_t columns, const Body& body) {
  const int64_t blocks = (columns + kColumns - 1) / kColumns;
  parallel_for((int64_t)pieces.size() * heads * blocks, [&](int64_t item) {
    const int64_t block = item % blocks, head = item / blocks % heads;
    body(pieces[(size_t)(item / blocks / heads)], head, block * kColumns, std::min(kColumns, columns - block * kColumns));
  });
}

}  // namespace kvreclaim::KVR_NS::recurrent_detail
