// The places highest of each row of scores, as ascending indices; of equal scores the lowest indices.
//
// Radix selection: two histograms of 11 bits and one of 10 find the score of the last place, then one pass
// in ascending order takes what lies above it and the first of those that equal it. No sort.
// Oracle: torch.sort(descending=True, stable=True), whose first places are the same set.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvreclaim {

struct SelectArgs {
  const float* scores;  // [rows, columns]; -inf is allowed
  int64_t rows, columns, places;  // 0 <= places <= columns
  int64_t* out;  // [rows, places]
  bool* nan;     // set if a score is NaN; out is then meaningless
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include "kvreclaim/memory.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS {

// Orders like the float: -0 equals 0, larger is larger.
KVR_INLINE uint32_t order_of(uint32_t bits) {
  bits = bits == 0x80000000u ? 0 : bits;
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

// Keys of a row; true if one is NaN.
inline bool row_keys(const float* scores, int64_t columns, uint32_t* keys) {
  uint32_t most = 0;
  for (int64_t i = 0; i < columns; ++i) {
    uint32_t bits;
    std::memcpy(&bits, scores + i, 4);
    const uint32_t magnitude = bits & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
    keys[i] = order_of(bits);
  }
  return most > 0x7f800000u;
}

// One digit of the key of the last place.
struct Digit {
  uint32_t value;
  int64_t left;  // places left among the keys with this digit
};

// Counts the digit of `count` keys and walks down from the largest until the places are used up.
inline Digit find_digit(const uint32_t* keys, int64_t count, int shift, int bits, int64_t places) {
  const uint32_t mask = (1u << bits) - 1;
  uint32_t counts[1 << 11];
  std::memset(counts, 0, sizeof(uint32_t) << bits);
  for (int64_t i = 0; i < count; ++i) ++counts[keys[i] >> shift & mask];
  uint32_t digit = mask;
  while (counts[digit] < places) places -= counts[digit--];
  return {digit, places};
}

inline int64_t keep_digit(uint32_t* keys, int64_t count, int shift, int bits, uint32_t digit) {
  const uint32_t mask = (1u << bits) - 1;
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    keys[kept] = keys[i];
    kept += (keys[i] >> shift & mask) == digit;
  }
  return kept;
}

inline void select_row(const uint32_t* keys, uint32_t* rest, int64_t columns, int64_t places, int64_t* out) {
  constexpr int kShifts[3] = {21, 10, 0}, kBits[3] = {11, 11, 10};
  std::memcpy(rest, keys, 4 * (size_t)columns);
  uint32_t last = 0;
  int64_t ties = places, count = columns;
  for (int i = 0; i < 3; ++i) {
    const Digit digit = find_digit(rest, count, kShifts[i], kBits[i], ties);
    count = keep_digit(rest, count, kShifts[i], kBits[i], digit.value);
    last |= digit.value << kShifts[i];
    ties = digit.left;
  }
  int64_t taken = 0;
  for (int64_t i = 0; taken < places; ++i) {
    const bool tie = keys[i] == last && ties > 0;
    ties -= tie;
    out[taken] = i;
    taken += (keys[i] > last) | tie;
  }
}

inline void select_top(const SelectArgs& a) {
  parallel_for(a.rows, [&](int64_t row) {
    uint32_t* keys = reinterpret_cast<uint32_t*>(thread_scratch(2 * a.columns + 2));
    if (row_keys(a.scores + row * a.columns, a.columns, keys)) __atomic_store_n(a.nan, true, __ATOMIC_RELAXED);
    if (a.places > 0) select_row(keys, keys + a.columns, a.columns, a.places, a.out + row * a.places);
  });
}

}  // namespace kvreclaim::KVR_NS
#endif
