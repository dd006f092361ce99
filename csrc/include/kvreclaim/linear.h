// y = x W^T + bias for few rows of x, reading the weights once, as they lie in the checkpoint.
//
// A decode step multiplies 1 to some tens of rows by every weight matrix. Up to some ten rows its time is that of
// reading the weights. A tile's weight rows come from distant parts of the matrix then, so that the memory serves
// several sequential streams at once: 4 streams read a tenth, 16 a third faster than one. x is laid out once per call:
// as it is where the CPU multiplies pairs of bf16, else widened to fp32, with even and odd elements apart, as the two
// halves of a word of bf16 are. An output is summed in an order that depends on K alone: it is the same, bit for bit,
// whatever the other rows, their number and the number of threads.
#pragma once

#include "kvreclaim/linear_tile.h"

#ifdef KVR_NS
#include <algorithm>

#include "kvreclaim/memory.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS::linear_detail {

constexpr int kTileOut = 4;                       // weight rows of a tile of many rows of x,
constexpr int kFewOut = kManyRegisters ? 8 : 4;   // of at most kHeldRows,
constexpr int kOneOut = kManyRegisters ? 16 : 8;  // and of one,
constexpr int kOneOutAlone = 4;                   // whose streams the CPU fetches alone
constexpr int64_t kRowsAtOnce = 64;               // rows of x held for a pass over the weights,
template <Type T>
constexpr int64_t kRowsHeld = kPairs<T> ? 2 * kRowsAtOnce : kRowsAtOnce;  // twice as many of half the size
template <Type T>
constexpr int64_t kLineOut = 64 / size_of(T);     // outputs that fill a line
constexpr int64_t kFewRows = 2 * kPassRows;       // above, pairs take longer to multiply than to read
constexpr int64_t kGroupBytes = 24 * 1024;        // weights that stay in the nearest cache, beside a panel
constexpr int64_t kAhead = 2048;                  // bytes between what a stream fetches and what it uses
constexpr int64_t kSerialWeights = 32 * 1024;     // a smaller matrix is not worth waking threads
constexpr int64_t kItemsPerThread = 4;            // so that a disturbed thread does not hold up all
constexpr int64_t kItemOut = 64;                  // an item has a multiple of these outputs

// AMD's CPUs read the streams of a single pass faster when nothing is fetched for them, and fewer of them; Intel's
// want both (docs/log.md).
inline bool streams_alone(int64_t rows) {
#if defined(__x86_64__)
  static const bool is_amd = __builtin_cpu_is("amd");
  return is_amd && rows <= kPassRows;
#else
  (void)rows;
  return false;
#endif
}

// The bias of a tile's sums.
template <Type T, int kOut, int kMost>
KVR_INLINE void load_bias(const LinearArgs& a, Outputs outputs, float* bias) {
  for (int i = 0; i < kOut * kMost; ++i) {
    const char* from = a.bias + (outputs.first + i % kOut * outputs.apart) * size_of(T);
    bias[i] = T == Type::kBF16 ? from_bf16(load<uint16_t>(from)) : load<float>(from);
  }
}

// kOut outputs of all `rows` rows of x, of which at most kMost are taken in a pass.
template <Type T, int kOut, int kMost>
KVR_INLINE void tiles(const LinearArgs& a, Outputs outputs, const float* x, int64_t stride, int64_t rows, Target to) {
  float bias[kOut * kMost + kLanes] = {};
  if (a.bias != nullptr) load_bias<T, kOut, kMost>(a, outputs, bias);
  Pass pass{streams_alone(rows) ? kOut : 0, (int)num_passes(rows), kAhead};
  for_each_pass(rows, [&](int64_t m, int64_t count) {
    tile_of<T, kOut, kMost>(count, a, outputs, x + m * stride, bias, to.at<T>(m, 0), pass);
    ++pass.index;
  });
}

// Outputs first to end - 1 of all rows.
template <Type T, int kOut, int kMost>
inline void span(const LinearArgs& a, int64_t first, int64_t end, const float* x, int64_t stride, int64_t rows,
                 char* y) {
  const int64_t apart = (end - first) / kOut;
  const Target to{y, a.out};
  for (int64_t n = first; n < first + apart; ++n)
    tiles<T, kOut, kMost>(a, {n, apart}, x, stride, rows, to.at<T>(0, n));
  for (int64_t n = first + apart * kOut; n < end; ++n) tiles<T, 1, kMost>(a, {n, 0}, x, stride, rows, to.at<T>(0, n));
}

// `count` tiles of neighbouring outputs from n on, which stay in the nearest cache for all rows. Meanwhile the next
// ones are fetched.
template <Type T, int kOut>
KVR_INLINE void group(const LinearArgs& a, int64_t n, int64_t count, const float* x, int64_t stride, int64_t rows,
                      Target to) {
  constexpr int kBias = kOut * kPassRows + kLanes;
  float bias[kLineOut<T> / kTileOut * kBias] = {};
  if (a.bias != nullptr)
    for (int64_t i = 0; i < count; ++i) load_bias<T, kOut, kPassRows>(a, {n + i * kOut, 1}, bias + i * kBias);
  Pass pass{0, (int)num_passes(rows), count * kOut * a.in * size_of(T)};
  for_each_pass(rows, [&](int64_t m, int64_t some) {
    for (int64_t i = 0; i < count; ++i)
      tile_of<T, kOut, kPassRows>(some, a, {n + i * kOut, 1}, x + m * stride, bias + i * kBias, to.at<T>(m, i * kOut),
                                  pass);
    ++pass.index;
  });
}

// The same for many rows: outputs that are neighbours fill a line of each row of y before it is written, since the
// rows of a wide y share few sets of a cache.
template <Type T>
inline void line_span(const LinearArgs& a, int64_t first, int64_t end, const float* x, int64_t stride, int64_t rows,
                      char* y) {
  alignas(64) char lines[kRowsHeld<T> * 64];
  int64_t size = kLineOut<T>;
  while (size > kTileOut && size * a.in * size_of(T) > kGroupBytes) size /= 2;
  for (int64_t n = first; n < end; n += kLineOut<T>) {
    const int64_t here = std::min(kLineOut<T>, end - n);
    const Target to{lines, kLineOut<T>};
    int64_t i = 0;
    for (int64_t some; (some = std::min(size, here - i) / kTileOut) > 0; i += some * kTileOut)
      group<T, kTileOut>(a, n + i, some, x, stride, rows, to.at<T>(0, i));
    for (; i < here; ++i) group<T, 1>(a, n + i, 1, x, stride, rows, to.at<T>(0, i));
    for (int64_t m = 0; m < rows; ++m)
      __builtin_memcpy(y + (m * a.out + n) * size_of(T), lines + m * 64, (size_t)(here * size_of(T)));
  }
}

// x in panels, one per pass: [steps, rows of the pass, kStep], zeros at the end; as it is for pairs, else as fp32, each
// step's halves apart.
template <Type T>
inline void lay_out(const LinearArgs& a, int64_t first, int64_t rows, float* to, int64_t stride) {
  constexpr int64_t kBytes = kStep * size_of(T);
  const int64_t whole = a.in / kStep, rest = a.in * size_of(T) % kBytes;
  const auto step = [](const char* from, float* at) {
    if constexpr (kPairs<T>) return store(at, load<vu>(from));
    store(at, half<T, 0>(from));
    store(at + kLanes, half<T, 1>(from));
  };
  for_each_pass(rows, [&](int64_t m0, int64_t count) {
    for (int64_t m = 0; m < count; ++m) {
      const char* row = a.x + (first + m0 + m) * a.x_stride * size_of(T);
      float* panel = to + m0 * stride + m * kPanelStep<T>;
      for (int64_t s = 0; s < whole; ++s) step(row + s * kBytes, panel + s * count * kPanelStep<T>);
      if (rest == 0) continue;
      char tail[kBytes] = {};
      __builtin_memcpy(tail, row + whole * kBytes, (size_t)rest);
      step(tail, panel + whole * count * kPanelStep<T>);
    }
  });
}

template <Type T>
inline void linear_typed(const LinearArgs& a) {
  const int64_t stride = (a.in + kStep - 1) / kStep * kPanelStep<T>;
  float* x = call_scratch(std::min(a.rows, kRowsHeld<T>) * stride);
  const int64_t items = a.in * a.out < kSerialWeights || max_threads() == 1 ? 1 : max_threads() * kItemsPerThread;
  const int64_t share = ((a.out + items - 1) / items + kItemOut - 1) / kItemOut * kItemOut;
  for (int64_t m = 0; m < a.rows; m += kRowsHeld<T>) {
    const int64_t rows = std::min(a.rows - m, kRowsHeld<T>);
    lay_out<T>(a, m, rows, x, stride);
    char* y = a.y + m * a.out * size_of(T);
    parallel_for((a.out + share - 1) / share, [&](int64_t item) {
      const int64_t first = item * share, end = std::min(first + share, a.out);
      if (rows == 1 && streams_alone(rows))
        span<T, kOneOutAlone, 1>(a, first, end, x, stride, rows, y);
      else if (rows == 1)
        span<T, kOneOut, 1>(a, first, end, x, stride, rows, y);
      else if (rows > kFewRows && kPairs<T>)
        line_span<T>(a, first, end, x, stride, rows, y);
      else if (rows <= kHeldRows && !(kPairs<T> && streams_alone(rows)))
        span<T, kFewOut, std::min(kHeldRows, kPassRows)>(a, first, end, x, stride, rows, y);
      else
        span<T, kTileOut, kPassRows>(a, first, end, x, stride, rows, y);
    });
  }
}

}  // namespace kvreclaim::KVR_NS::linear_detail

#endif
