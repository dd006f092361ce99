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

// 32 numbers as sums of two bf16 numbers: the nearest, and what it leaves.
struct PartsOfBF16 {
  __m512i high, low;

  KVR_INLINE PartsOfBF16(__m512 a, __m512 b) : high((__m512i)_mm512_cvtne2ps_pbh(b, a)) {
    const auto widen = [](__m256i x) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); };
    const __m512 rest_a = _mm512_sub_ps(a, widen(_mm512_castsi512_si256(high)));
    const __m512 rest_b = _mm512_sub_ps(b, widen(_mm512_extracti64x4_epi64(high, 1)));
    low = (__m512i)_mm512_cvtne2ps_pbh(rest_b, rest_a);
  }
};

}  // namespace kvreclaim::KVR_NS
#endif
