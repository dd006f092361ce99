// Tiles of a linear layer: a few weight rows times a few rows of x, whose sums stay in registers.
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
#include <type_traits>
#include <utility>

#include "kvreclaim/simd.h"

namespace kvreclaim::KVR_NS::linear_detail {

constexpr int64_t kStep = 2 * kLanes;             // elements of a row that one step reads
constexpr bool kManyRegisters = kRegisters >= 32;
constexpr int kPassRows = kManyRegisters ? 6 : 2;  // rows of x of a tile, at most
constexpr int kHeldRows = 3;                      // up to here a tile holds x in registers, above the weights
// Whether products are those of pairs of bf16, which take x as it is and numbers smaller than normal ones as 0. Weights
// that are turned to lanes of outputs first, which need no sums over lanes, take twice as long at few rows and gain
// a tenth at 100 (docs/log.md).
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
template <Type T>
constexpr bool kPairs = T == Type::kBF16;
#else
template <Type T>
constexpr bool kPairs = false;
#endif
template <Type T>
constexpr int64_t kPanelStep = kPairs<T> ? kLanes : kStep;  // words of a step of a row of x

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

constexpr int power_from(int count) {
  int power = 1;
  while (power < count) power *= 2;
  return power;
}

// Lane i * kLanes / power_from(C) of the result, i < C: the sum of the lanes of v[i]. Destroys v.
template <int C, int H = kLanes / 2>
KVR_INLINE vf fold_each(vf* v) {
  constexpr int kLeft = C > 1 ? power_from(C) / 2 : 1;
#pragma GCC unroll 16
  for (int j = 0; j < kLeft; ++j)
    v[j] = fold_lanes<H>(v[j], v[j + kLeft < C ? j + kLeft : j], std::make_integer_sequence<int, kLanes>());
  if constexpr (H > 1) return fold_each<kLeft, H / 2>(v);
  return v[0];
}

// Lanes 0, S, 2 S, ... first.
template <int S, int... I>
KVR_INLINE vf every_lane(vf v, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(v, v, (I * S % kLanes)...);
#else
  return __builtin_shuffle(v, vi{(I * S % kLanes)...});
#endif
}

// Lane i of the result, i < C: the sum of the lanes of v[i], added in an order that is the same for every C <= kLanes.
// Destroys v.
template <int C>
KVR_INLINE vf sum_each(vf* v) {
  return every_lane<kLanes / power_from(C)>(fold_each<C>(v), std::make_integer_sequence<int, kLanes>());
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
  int64_t ahead;  // bytes between what a stream fetches and what it uses
};

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
      for (int64_t b = 0; b < kBytes; b += 64) prefetch(w + o * apart + pass.ahead + b);
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

// Where they are written: output `first` of row 0, and elements from one row to the next.
struct Target {
  char* y;
  int64_t pitch;

  template <Type T>
  KVR_INLINE Target at(int64_t row, int64_t output) const {
    return {y + (row * pitch + output) * size_of(T), pitch};
  }
};

template <Type T, int kOut, int kIn>
inline void tile(const LinearArgs& a, Outputs outputs, const float* panel, const float* bias, Target to, Pass pass) {
  constexpr int kSums = kOut * kIn;
  const int64_t row_bytes = a.in * size_of(T);
  vf acc[kSums] = {};
  multiply<T, kOut, kIn>(acc, a.w + outputs.first * row_bytes, row_bytes, outputs.apart * row_bytes, panel, pass);
  uint32_t sums[kSums + kLanes];
  finish<T, kSums>(acc, bias, sums);
  for (int m = 0; m < kIn; ++m)
    for (int o = 0; o < kOut; ++o) {
      const std::conditional_t<T == Type::kBF16, uint16_t, uint32_t> bits = sums[m * kOut + o];
      const int64_t at = m * to.pitch + o * outputs.apart;
      __builtin_memcpy(to.y + at * size_of(T), &bits, sizeof(bits));
    }
}

// The tile of `rows` rows of x, 1 to kMost.
template <Type T, int kOut, int kMost>
KVR_INLINE void tile_of(int64_t rows, const LinearArgs& a, Outputs outputs, const float* panel, const float* bias,
                        Target to, Pass pass) {
  if (rows == kMost) return tile<T, kOut, kMost>(a, outputs, panel, bias, to, pass);
  if constexpr (kMost > 1) tile_of<T, kOut, kMost - 1>(rows, a, outputs, panel, bias, to, pass);
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

}  // namespace kvreclaim::KVR_NS::linear_detail
#endif
