// Matrix tiles (AMX): 16 rows of 64 bytes, factors of bf16 and sums of fp32.
#pragma once

#include "kvreclaim/simd.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define KVR_MATRIX

namespace kvreclaim::KVR_NS {

constexpr int kMatrixRows = 16;   // rows of a matrix tile
constexpr int kMatrixDims = 32;   // bf16 numbers of one of its rows, as a factor
constexpr int kMatrixBytes = 1024;

// Rows of the tiles and bytes of a row, as the CPU takes them.
struct MatrixConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  KVR_INLINE void set(int first, int end, int64_t tile_rows, int64_t bytes) {
    for (int i = first; i < end; ++i) rows[i] = (uint8_t)tile_rows, row_bytes[i] = (uint16_t)bytes;
  }
};

}  // namespace kvreclaim::KVR_NS
#endif
