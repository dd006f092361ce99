// What the kernels of recurrent layers share: numbers of a row, the tokens of a step in rounds, the convolution of many
// tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kvreclaim/decoder.h"
#include "kvreclaim/memory.h"
#include "kvreclaim/recurrent_args.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS::recurrent_detail {

using decoder_detail::silu;

template <Type T>
KVR_INLINE float at(const char* p, int64_t i) {
  if constexpr (T == Type::kF32) return load<float>(p + 4 * i);
  return from_bf16(load<uint16_t>(p + 2 * i));
}

template <Type T>
KVR_INLINE void put(char* p, int64_t i, float x) {
  if constexpr (T == Type::kF32)
    store(p + 4 * i, x);
  else
    store(p + 2 * i, to_bf16(x));
}

template <Type T>
KVR_INLINE float rounded(float x) {
  return T == Type::kF32 ? x : from_bf16(to_bf16(x));
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// x -> SiLU(x), rounded before and after.
template <Type T>
inline void silu_row(float* x, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    vf v{};
    const int64_t here = std::min<int64_t>(kLanes, count - i);
    __builtin_memcpy(&v, x + i, (size_t)(4 * here));
    v = norm_detail::rounded<T>(silu(norm_detail::rounded<T>(v)));
    __builtin_memcpy(x + i, &v, (size_t)(4 * here));
  }
}

inline float dot(const float* x, const float* y, int64_t count) {
  vf sum{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sum += load<vf>(x + i) * load<vf>(y + i);
  float rest = hsum(sum);
  for (; i < count; ++i) rest += x[i] * y[i];
  return rest;
}

constexpr int64_t kRound = 128;  // tokens of a sequence that go through all loops before the next ones

// Tokens of one sequence in one round.
struct Piece {
  int64_t row, count;  // in the step
  int64_t at;          // row in the round's scratch
  int64_t from;        // slot that is read; -1: zeros
  int64_t carry;       // slot for the next round; -1: the sequence ends here
  int64_t limited;     // tokens that dt_least and dt_most hold for: those of a prompt
};

// body(pieces, rows in scratch) for each round.
template <class Body>
inline void for_each_round(const StepRows& s, const Body& body) {
  std::vector<Piece> pieces;
  for (int64_t first = 0;; first += kRound) {
    int64_t rows = 0;
    pieces.clear();
    for (int64_t n = 0; n < s.count; ++n) {
      const int64_t start = s.starts[n], end = s.starts[n + 1], row = start + first;
      if (row >= end) continue;
      int64_t known = start;  // the first token whose state is kept; drafts follow
      while (s.write[known] < 0) ++known;
      const bool decodes = known == start && s.read[n] >= 0;
      const int64_t count = std::min(kRound, end - row), last = s.write[end - 1];
      pieces.push_back({row, count, rows, first ? last : s.read[n], row + count < end ? last : -1,
                        decodes ? 0 : std::min(count, known + 1 - row)});
      rows += count;
    }
    if (pieces.empty()) return;
    body(pieces, rows);
  }
}

constexpr int64_t kShare = 8;  // rows of a work item

// body(row in the step, row in scratch) for all rows of a round.
template <class Body>
inline void for_each_row(const std::vector<Piece>& pieces, int64_t rows, const Body& body) {
  parallel_for((rows + kShare - 1) / kShare, [&](int64_t item) {
    const int64_t end = std::min(rows, (item + 1) * kShare);
    size_t n = 0;
    for (int64_t at = item * kShare; at < end; ++at) {
      while (at >= pieces[n].at + pieces[n].count) ++n;
      body(pieces[n], pieces[n].row + at - pieces[n].at, at);
    }
  });
}

inline int64_t most_rows(const StepRows& s) { return std::min(s.tokens, s.count * kRound); }

inline int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// The convolution of `count` channels from `first` on for a piece's tokens: in(t, x) fills what token t brings, out(t, y)
// takes what comes out. Inputs are kept in a ring, each at its token's number modulo its size.
template <Type T, class In, class Out>
inline void convolve_piece(const StepRows& s, const ConvStep& c, const Piece& piece, int64_t first, int64_t count,
                           const In& in, const Out& out) {
  const int64_t width = c.width, kept = c.kept, size = std::max(width, kept), n = padded(count);
  const int64_t slot_bytes = c.channels * kept * size_of(T);
  float *ring = thread_scratch((size + width + 2) * n), *weight = ring + size * n, *bias = weight + width * n;
  float* y = bias + n;
  std::fill(ring, y + n, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < width; ++j) weight[j * n + i] = at<T>(c.weight, (first + i) * width + j);
    if (c.bias != nullptr) bias[i] = at<T>(c.bias, first + i);
    if (piece.from < 0) continue;
    const char* old = c.states + piece.from * slot_bytes;
    for (int64_t j = 0; j < kept; ++j) ring[(j + size - kept) * n + i] = at<T>(old, (first + i) * kept + j);
  }
  const auto keep = [&](int64_t t, int64_t slot) {
    char* to = c.states + slot * slot_bytes;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < kept; ++j) put<T>(to, (first + i) * kept + j, ring[(t + 1 + j + size - kept) % size * n + i]);
  };
  for (int64_t t = 0; t < piece.count; ++t) {
    in(t, ring + t % size * n);
    const float* taps[kMostWidth];
    for (int64_t j = 0; j < width; ++j) taps[j] = ring + (t + 1 + j + size - width) % size * n;
    for (int64_t i = 0; i < n; i += kLanes) {
      vf sum = load<vf>(bias + i);
      for (int64_t j = 0; j < width; ++j) sum += load<vf>(weight + j * n + i) * load<vf>(taps[j] + i);
      store(y + i, sum);
    }
    out(t, y);
    if (const int64_t slot = s.write[piece.row + t]; slot >= 0) keep(t, slot);
  }
  if (piece.carry >= 0) keep(piece.count - 1, piece.carry);
}

// y [rows, channels]: SiLU of the convolution.
template <Type T>
inline void convolve_pieces(const StepRows& s, const ConvStep& c, const std::vector<Piece>& pieces, float* y) {
  parallel_for((int64_t)pieces.size() * c.num_pieces, [&](int64_t item) {
    const Piece& piece = pieces[(size_t)(item / c.num_pieces)];
    const int64_t* run = c.pieces + 3 * (item % c.num_pieces);
    const char* x = s.rows + (piece.row * s.stride + run[0]) * size_of(T);
    float* own = y + piece.at * c.channels + run[1];
    convolve_piece<T>(
        s, c, piece, run[1], run[2],
        [&](int64_t t, float* to) {
          for (int64_t i = 0; i < run[2]; ++i) to[i] = at<T>(x + t * s.stride * size_of(T), i);
        },
        [&](int64_t t, float* from) {
          silu_row<T>(from, run[2]);
          std::copy_n(from, run[2], own + t * c.channels);
        });
  });
}

}  // namespace kvreclaim::KVR_NS::recurrent_detail
