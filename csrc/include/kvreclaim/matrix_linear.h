// linear by matrix tiles: weight rows are a factor as they lie, x is laid in pairs of elements by rows. One pass over
// the weights serves 64 rows of x. Products of bf16 are exact and summed in fp32, in an order that depends on K alone.
#pragma once

#include "kvreclaim/linear.h"
#ifdef KVR_NS
#include "kvreclaim/matrix_tiles.h"
#endif

#ifdef KVR_MATRIX

namespace kvreclaim::KVR_NS::linear_detail {

constexpr int kMatrixCols = 16;                // rows of x that are the columns of a tile
constexpr int64_t kMatrixAhead = 2048;  // bytes between what a stream fetches and what it uses

KVR_INLINE bool takes_matrices(const LinearArgs& a) {
  return a.type == Type::kBF16 && a.in % kMatrixDims == 0 && a.out >= kMatrixRows;
}

// Rows first .. first + rows of x as [K / 32] tiles of [16 pairs][cols]; rows that are not there are zero.
inline void pack_columns(const LinearArgs& a, int64_t first, int64_t rows, int64_t cols, char* to) {
  const int64_t words = a.in / 2;
  uint32_t* packed = reinterpret_cast<uint32_t*>(to);
  if (rows < cols) __builtin_memset(to, 0, (size_t)(words * cols * 4));
  for (int64_t m = 0; m < rows; ++m) {
    const char* row = a.x + (first + m) * a.x_stride * 2;
    for (int64_t w = 0; w < words; ++w) packed[w * cols + m] = load<uint32_t>(row + 4 * w);
  }
}

// x as its tiles: blocks of `cols` rows, 16 or, if it has fewer, as many as there are.
struct Columns {
  const char* data;
  int64_t cols, block;  // block: bytes of one
};

// C blocks of x times 16 outputs.
template <int C>
KVR_INLINE void matrix_products(const LinearArgs& a, Outputs outputs, const Columns& columns, float* sums) {
  const char* x = columns.data;
  const int64_t block = columns.block, stride = 4 * columns.cols;
  const int64_t row_bytes = 2 * a.in, apart = outputs.apart * row_bytes;
  const char* w = a.w + outputs.first * row_bytes;
  _tile_zero(0);
  if constexpr (C > 1) _tile_zero(1);
  if constexpr (C > 2) _tile_zero(2);
  if constexpr (C > 3) _tile_zero(3);
  for (int64_t at = 0; at < row_bytes; at += 64, x += 16 * stride) {
    _tile_loadd(4, w + at, apart);
    _tile_loadd(5, x, stride);
    _tile_dpbf16ps(0, 4, 5);
#pragma GCC unroll 16
    for (int r = 0; r < kMatrixRows; ++r) prefetch(w + at + kMatrixAhead + r * apart);
    if constexpr (C > 1) {
      _tile_loadd(6, x + block, stride);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (C > 2) {
      _tile_loadd(7, x + 2 * block, stride);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (C > 3) {
      _tile_loadd(5, x + 3 * block, stride);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, sums, 64);
  if constexpr (C > 1) _tile_stored(1, sums + 256, 64);
  if constexpr (C > 2) _tile_stored(2, sums + 512, 64);
  if constexpr (C > 3) _tile_stored(3, sums + 768, 64);
}

// sums [blocks][16 outputs][16 rows] -> rows of y, with the bias.
KVR_INLINE void write_columns(const LinearArgs& a, Outputs outputs, const float* sums, int64_t rows, char* y) {
  const __m512i column = _mm512_mullo_epi32((__m512i)iota(), _mm512_set1_epi32(kMatrixCols));
  vf bias{};
  if (a.bias != nullptr)
    for (int o = 0; o < kMatrixRows; ++o)
      bias[o] = from_bf16(load<uint16_t>(a.bias + 2 * (outputs.first + o * outputs.apart)));
  for (int64_t m = 0; m < rows; ++m) {
    const float* from = sums + m / kMatrixCols * 256 + m % kMatrixCols;
    const vu bits = round_bf16((vf)_mm512_i32gather_ps(column, from, 4) + bias) >> 16;
    char* to = y + 2 * (m * a.out + outputs.first);
    if (outputs.apart == 1) {
      _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)bits));
    } else {
      for (int o = 0; o < kMatrixRows; ++o) store(to + 2 * o * outputs.apart, (uint16_t)bits[o]);
    }
  }
}

// Sixteen outputs of up to 64 rows.
inline void matrix_outputs(const LinearArgs& a, Outputs outputs, const Columns& x, int64_t rows, char* y) {
  alignas(64) float sums[4 * 256];
  switch ((rows + kMatrixCols - 1) / kMatrixCols) {
    case 1: matrix_products<1>(a, outputs, x, sums); break;
    case 2: matrix_products<2>(a, outputs, x, sums); break;
    case 3: matrix_products<3>(a, outputs, x, sums); break;
    default: matrix_products<4>(a, outputs, x, sums);
  }
  write_columns(a, outputs, sums, rows, y);
}

// Outputs first .. end - 1 of up to 64 rows: of few rows, whose time is that of reading the weights, from distant
// parts of the matrix, of more from neighbours, which are written together.
inline void matrix_span(const LinearArgs& a, int64_t first, int64_t end, const Columns& x, int64_t rows, char* y) {
  const int64_t apart = (end - first) / kMatrixRows;
  for (int64_t i = 0; i < apart; ++i)
    matrix_outputs(a, rows <= kMatrixCols ? Outputs{first + i, apart} : Outputs{first + i * kMatrixRows, 1}, x, rows, y);
  if (apart * kMatrixRows < end - first) matrix_outputs(a, {std::max<int64_t>(end - kMatrixRows, 0), 1}, x, rows, y);
}

inline void matrix_linear(const LinearArgs& a) {
  const int64_t most = std::min(a.rows, kRowsAtOnce), blocks = (most + kMatrixCols - 1) / kMatrixCols;
  const int64_t cols = std::min<int64_t>(most, kMatrixCols), block = a.in * cols * 2;
  char* packed = reinterpret_cast<char*>(call_scratch(blocks * block / 4));
  const int64_t items = a.in * a.out < kSerialWeights || max_threads() == 1 ? 1 : max_threads() * kItemsPerThread;
  const int64_t share = ((a.out + items - 1) / items + kItemOut - 1) / kItemOut * kItemOut;
  MatrixConfig config;
  config.set(0, 8, kMatrixRows, 4 * cols);  // sums and x
  config.set(4, 5, kMatrixRows, 64);        // weights
  for (int64_t m = 0; m < a.rows; m += kRowsAtOnce) {
    const int64_t rows = std::min(a.rows - m, kRowsAtOnce);
    for (int64_t r = 0; r < rows; r += cols)
      pack_columns(a, m + r, std::min(rows - r, cols), cols, packed + r / cols * block);
    char* y = a.y + m * a.out * 2;
    parallel_for((a.out + share - 1) / share, [&](int64_t item) {
      _tile_loadconfig(&config);
      matrix_span(a, item * share, std::min((item + 1) * share, a.out), {packed, cols, block}, rows, y);
      _tile_release();
    });
  }
}

}  // namespace kvreclaim::KVR_NS::linear_detail
#endif

#ifdef KVR_NS
namespace kvreclaim::KVR_NS {

inline void linear(const LinearArgs& a) {
#ifdef KVR_MATRIX
  if (linear_detail::takes_matrices(a)) return linear_detail::matrix_linear(a);
#endif
  if (a.type == Type::kBF16)
    linear_detail::linear_typed<Type::kBF16>(a);
  else
    linear_detail::linear_typed<Type::kF32>(a);
}

}  // namespace kvreclaim::KVR_NS
#endif
