// y = x W^T + bias for few rows of x, reading the weights once, as they lie in the checkpoint.
//
// A decode step multiplies 1 to some tens of rows by every weight matrix, so its time is that of reading the
// weights. A tile of a few weight rows times a few rows of x stays in registers. Its weight rows come from
// distant parts of the matrix, so that the memory serves several sequential streams at once: 4 streams read a
// tenth, 16 a third faster than one. x is widened to fp32 once per call, with even and odd elements apart, as
// the two halves of a word of bf16 are. An output is summed in an order that depends on K alone: it is the
// same, bit for bit, whatever the other rows, their number and the number of threads.
#pragma once

#include <cstdint>

#include "kvreclaim/layout.h"

namespace kvreclaim {

// x [M, K] with unit stride along K, w [N, K] contiguous, bias [N] or null, y [M, N] contiguous; all of one
// type. Sums are fp32, bias included, and rounded once.
struct LinearArgs {
  const char* x;
  const char* w;
  const char* bias;
  char* y;
  int64_t rows, in, out;  // M, K, N
  int64_t x_stride;       // elements from one row of x to the next
  Type type;
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include <algorithm>
#include <type_traits>
#include <utility>

#include "kvreclaim/memory.h"
#include "kvreclaim/simd.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS::linear_detail {

constexpr int64_t kStep = 2 * kLanes;            // elements of a row that one step reads
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
template <Type T>
constexpr bool kPairs = T == Type::kBF16;        // products of pairs of bf16, which take x as it is
#else
template <Type T>
constexpr bool kPairs = false;
#endif
template <Type T>
constexpr int64_t kPanelStep = kPairs<T> ? kLanes : kStep;  // words of a step of a row of x
constexpr bool kManyRegisters = kRegisters >= 32;
constexpr int kPassRows = kManyRegisters ? 6 : 2;  // rows of x of a tile, at most
constexpr int kHeldRows = 3;                     // up to here a tile holds x in registers, above the weights
constexpr int kTileOut = 4;                      // weight rows of a tile of many rows of x,
constexpr int kFewOut = kManyRegisters ? 8 : 4;  // of at most kHeldRows,
constexpr int kOneOut = kManyRegisters ? 16 : 8;  // and of one,
constexpr int kOneOutAlone = 4;                  // whose streams the CPU fetches alone
constexpr int64_t kRowsAtOnce = 64;              // rows of x held in fp32
constexpr int64_t kAhead = 2048;                 // bytes between what a stream fetches and what it uses
constexpr int64_t kSerialWeights = 32 * 1024;    // a smaller matrix is not worth waking threads
constexpr int64_t kItemsPerThread = 4;           // so that a disturbed thread does not hold up all
constexpr int64_t kItemOut = 64;                 // an item has a multiple of these outputs

template <int H, int... I>
KVR_INLINE vf fold_lanes(vf a, vf b, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  const vf own = __builtin_shufflevector(a, b, ((I & H) ? kLanes + I : I)...);
  const vf other = __builtin_shufflevector(a, b, ((I & H) ? kLanes + (I ^ H) : (I ^ H))...);
#else
  const vf own = __builtin_shuffle(a, b, vi{((I & H) ? kLanes + I : I)...});
  const vf other = __builtin_shuffle(a, b, vi{((I & H) ? kLanes + (I ^ H) : (I ^ H))...});
#endif
  return own + other;
}

// Lane i of the result, i < C: the sum of the lanes of v[i]. C <= kLanes. Destroys v.
template <int C, int H = kLanes / 2>
KVR_INLINE vf sum_each(vf* v) {
  constexpr int kLeft = C < H ? C : H;
#pragma GCC unroll 16
  for (int j = 0; j < kLeft; ++j)
    v[j] = fold_lanes<H>(v[j], v[j + H < C ? j + H : j], std::make_integer_sequence<int, kLanes>());
  if constexpr (H > 1) return sum_each<kLeft, H / 2>(v);
  return v[0];
}

// Half of the kStep elements at p as fp32: the even or the odd ones of bf16, the first or the last of fp32.
template <Type T, int kHalf>
KVR_INLINE vf half(const char* p) {
  if constexpr (T == Type::kF32) return load<vf>(p + kHalf * sizeof(vf));
  const vu words = load<vu>(p);
  return kHalf == 0 ? even(words) : odd(words);
}

#if defined(__AVX512BF16__)
// acc[m * kOut + o] += w[o] * x[m] over a step, by products of pairs.
template <int kOut, int kIn>
KVR_INLINE void pair_step(vf* acc, const char* w, int64_t apart, const float* x) {
  constexpr bool kHeld = kIn <= kHeldRows;
  __m512bh held[kHeld ? kIn : kOut];
#pragma GCC unroll 16
  for (int i = 0; i < (kHeld ? kIn : kOut); ++i)
    held[i] = load<__m512bh>(kHeld ? (const char*)(x + i * kLanes) : w + i * apart);
#pragma GCC unroll 16
  for (int i = 0; i < (kHeld ? kOut : kIn); ++i) {
    const __m512bh other = load<__m512bh>(kHeld ? w + i * apart : (const char*)(x + i * kLanes));
#pragma GCC unroll 16
    for (int j = 0; j < (kHeld ? kIn : kOut); ++j) {
      vf& sum = acc[kHeld ? j * kOut + i : i * kOut + j];
      sum = (vf)pairs((__m512)sum, held[j], other);
    }
  }
}
#endif

// The same pointer, of which the compiler forgets that it has read through it.
KVR_INLINE const char* forget(const char* p) {
  asm("" : "+r"(p));
  return p;
}

// acc[m * kOut + o] += w[o] * x[m] over one half of a step; weight rows are `apart` bytes from each other.
template <Type T, int kHalf, int kOut, int kIn>
KVR_INLINE void half_step(vf* acc, const char* w, int64_t apart, const float* panel) {
  const float* x = panel + kHalf * kLanes;
  if constexpr (kIn <= kHeldRows) {
    vf values[kIn];
#pragma GCC unroll 16
    for (int m = 0; m < kIn; ++m) values[m] = load<vf>(x + m * kStep);
#pragma GCC unroll 16
    for (int o = 0; o < kOut; ++o) {
      const vf weights = half<T, kHalf>(w + o * apart);
#pragma GCC unroll 16
      for (int m = 0; m < kIn; ++m) acc[m * kOut + o] += weights * values[m];
    }
  } else {
    vf weights[kOut];
#pragma GCC unroll 16
    for (int o = 0; o < kOut; ++o) weights[o] = half<T, kHalf>(w + o * apart);
#pragma GCC unroll 16
    for (int m = 0; m < kIn; ++m) {
      const vf value = load<vf>(x + m * kStep);
#pragma GCC unroll 16
      for (int o = 0; o < kOut; ++o) acc[m * kOut + o] += weights[o] * value;
    }
  }
}

// Which of a tile's streams one pass fetches ahead: its number and the number of passes over the same weights,
// which share the work, so that the memory is busy during all of them. `index` beyond the streams: none.
struct Pass {
  int index, count;
};

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

// acc += the products of a step. The words of weights are read twice where they are widened, the second time from the
// nearest cache, which leaves the registers to the sums.
template <Type T, int kOut, int kIn>
KVR_INLINE void whole_step(vf* acc, const char* w, int64_t apart, const float* panel) {
#if defined(__AVX512BF16__)
  if constexpr (kPairs<T>) return pair_step<kOut, kIn>(acc, w, apart, panel);
#endif
  half_step<T, 0, kOut, kIn>(acc, w, apart, panel);
  half_step<T, 1, kOut, kIn>(acc, forget(w), apart, panel);
}

// acc += the products of kOut weight rows with a panel of kIn rows of x.
template <Type T, int kOut, int kIn>
KVR_INLINE void multiply(vf* acc, const char* w, int64_t row_bytes, int64_t apart, const float* panel, Pass pass) {
  constexpr int64_t kBytes = kStep * size_of(T);
  const int64_t whole = row_bytes / kBytes, rest = row_bytes % kBytes;
  for (int64_t s = 0; s < whole; ++s, panel += kIn * kPanelStep<T>, w += kBytes) {
    for (int o = pass.index; o < kOut; o += pass.count)
      for (int64_t b = 0; b < kBytes; b += 64) prefetch(w + o * apart + kAhead + b);
    whole_step<T, kOut, kIn>(acc, w, apart, panel);
  }
  if (rest > 0) {
    char tail[kOut * kBytes] = {};
    for (int o = 0; o < kOut; ++o) __builtin_memcpy(tail + o * kBytes, w + o * apart, (size_t)rest);
    whole_step<T, kOut, kIn>(acc, tail, kBytes, panel);
  }
}

// sums[i], i < C: acc[i] added up, with its bias, as the bits of T.
template <Type T, int C>
KVR_INLINE void finish(vf* acc, const float* bias, uint32_t* sums) {
  const vf total = sum_each<(C < kLanes ? C : kLanes)>(acc) + load<vf>(bias);
  store(sums, T == Type::kBF16 ? round_bf16(total) >> 16 : (vu)total);
  if constexpr (C > kLanes) finish<T, C - kLanes>(acc + kLanes, bias + kLanes, sums + kLanes);
}

// Where a tile's outputs are: kOut of them, `apart` outputs from each other.
struct Outputs {
  int64_t first, apart;
};

template <Type T, int kOut, int kIn>
inline void tile(const LinearArgs& a, Outputs outputs, const float* panel, const float* bias, char* y, Pass pass) {
  constexpr int kSums = kOut * kIn;
  const int64_t row_bytes = a.in * size_of(T);
  vf acc[kSums] = {};
  multiply<T, kOut, kIn>(acc, a.w + outputs.first * row_bytes, row_bytes, outputs.apart * row_bytes, panel, pass);
  uint32_t sums[kSums + kLanes];
  finish<T, kSums>(acc, bias, sums);
  for (int m = 0; m < kIn; ++m)
    for (int o = 0; o < kOut; ++o) {
      const std::conditional_t<T == Type::kBF16, uint16_t, uint32_t> bits = sums[m * kOut + o];
      const int64_t at = m * a.out + outputs.first + o * outputs.apart;
      __builtin_memcpy(y + at * size_of(T), &bits, sizeof(bits));
    }
}

// The tile of `rows` rows of x, 1 to kMost.
template <Type T, int kOut, int kMost>
KVR_INLINE void tile_of(int64_t rows, const LinearArgs& a, Outputs outputs, const float* panel, const float* bias,
                        char* y, Pass pass) {
  if (rows == kMost) return tile<T, kOut, kMost>(a, outputs, panel, bias, y, pass);
  if constexpr (kMost > 1) tile_of<T, kOut, kMost - 1>(rows, a, outputs, panel, bias, y, pass);
}

KVR_INLINE int64_t num_passes(int64_t rows) { return (rows + kPassRows - 1) / kPassRows; }

// body(first row, rows) for passes of nearly equal size, at most kPassRows.
template <class Body>
KVR_INLINE void for_each_pass(int64_t rows, const Body& body) {
  int64_t m = 0;
  for (int64_t left = num_passes(rows); left > 0; --left) {
    const int64_t count = (rows - m + left - 1) / left;
    body(m, count);
    m += count;
  }
}

// kOut outputs of all `rows` rows of x, of which at most kMost are taken in a pass.
template <Type T, int kOut, int kMost>
KVR_INLINE void tiles(const LinearArgs& a, Outputs outputs, const float* x, int64_t stride, int64_t rows, char* y) {
  float bias[kOut * kMost + kLanes] = {};
  if (a.bias != nullptr)
    for (int i = 0; i < kOut * kMost; ++i) {
      const char* from = a.bias + (outputs.first + i % kOut * outputs.apart) * size_of(T);
      bias[i] = T == Type::kBF16 ? from_bf16(load<uint16_t>(from)) : load<float>(from);
    }
  Pass pass{streams_alone(rows) ? kOut : 0, (int)num_passes(rows)};
  for_each_pass(rows, [&](int64_t m, int64_t count) {
    tile_of<T, kOut, kMost>(count, a, outputs, x + m * stride, bias, y + m * a.out * size_of(T), pass);
    ++pass.index;
  });
}

// Outputs first to end - 1 of all rows.
template <Type T, int kOut, int kMost>
inline void span(const LinearArgs& a, int64_t first, int64_t end, const float* x, int64_t stride, int64_t rows,
                 char* y) {
  const int64_t apart = (end - first) / kOut;
  for (int64_t i = 0; i < apart; ++i) tiles<T, kOut, kMost>(a, {first + i, apart}, x, stride, rows, y);
  for (int64_t n = first + apart * kOut; n < end; ++n) tiles<T, 1, kMost>(a, {n, 0}, x, stride, rows, y);
}

// x as fp32 in panels, one per pass: [steps, rows of the pass, kStep], each step's halves apart, zeros at the end.
template <Type T>
inline void widen(const LinearArgs& a, int64_t first, int64_t rows, float* to, int64_t stride) {
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
  float* x = call_scratch(std::min(a.rows, kRowsAtOnce) * stride);
  const int64_t items = a.in * a.out < kSerialWeights || max_threads() == 1 ? 1 : max_threads() * kItemsPerThread;
  const int64_t share = ((a.out + items - 1) / items + kItemOut - 1) / kItemOut * kItemOut;
  for (int64_t m = 0; m < a.rows; m += kRowsAtOnce) {
    const int64_t rows = std::min(a.rows - m, kRowsAtOnce);
    widen<T>(a, m, rows, x, stride);
    char* y = a.y + m * a.out * size_of(T);
    parallel_for((a.out + share - 1) / share, [&](int64_t item) {
      const int64_t first = item * share, end = std::min(first + share, a.out);
      if (rows == 1 && streams_alone(rows))
        span<T, kOneOutAlone, 1>(a, first, end, x, stride, rows, y);
      else if (rows == 1)
        span<T, kOneOut, 1>(a, first, end, x, stride, rows, y);
      else if (rows <= kHeldRows)
        span<T, kFewOut, std::min(kHeldRows, kPassRows)>(a, first, end, x, stride, rows, y);
      else
        span<T, kTileOut, kPassRows>(a, first, end, x, stride, rows, y);
    });
  }
}

}  // namespace kvreclaim::KVR_NS::linear_detail

#endif
