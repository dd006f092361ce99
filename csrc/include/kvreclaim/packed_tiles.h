// packed_linear, and for many rows of x by matrix tiles (AMX). Weights are unpacked once for a slab of rows, to sums of
// two bf16 numbers, and so is x where it is fp32. Products of bf16 are exact and summed in fp32; what is left out is at
// most 2^-16 of |x| |w|. For x of 8 bits both are rounded to one bf16 number. An output is summed in an order that
// depends on K alone, so rows of x do not depend on each other.
#pragma once

#include "kvreclaim/packed.h"

#ifdef KVR_NS
#include "kvreclaim/matrix_tiles.h"
#endif

#ifdef KVR_MATRIX

namespace kvreclaim::KVR_NS::packed_detail {

constexpr int64_t kPanelRows = 64;   // of x, above which tiles multiply: a decode step has no more
constexpr int64_t kSlabRows = 512;   // of x, for which weights are unpacked once
constexpr int64_t kSpanBlocks = 8;   // at most, of weights, whose sums a thread holds
constexpr int64_t kDepth = 8;        // chunks of them that are unpacked at once
constexpr int64_t kTileSums = kMatrixRows * kBlockRows;

KVR_INLINE bool takes_tiles(const PackedArgs& a) {
  return a.rows > kPanelRows && a.activations != Activations::kExact;
}

// x [16 rows, 32 columns] as tiles: [rows / 16][K / 32][parts].
template <Type T>
inline void tile_rows(const PackedArgs& a, int64_t first, int64_t in, int parts, char* to) {
  const int64_t count = std::min<int64_t>(kMatrixRows, a.rows - first);
  if (count < kMatrixRows) __builtin_memset(to, 0, (size_t)(in / kChunkCols * parts * kMatrixBytes));
  for (int64_t r = 0; r < count; ++r) {
    const char* row = a.x + (first + r) * in * size_of(T);
    char* line = to + r * 64;
    for (int64_t k = 0; k < in; k += kChunkCols, line += parts * kMatrixBytes) {
      const PartsOfBF16 x((__m512)numbers_at<T>(row, k), (__m512)numbers_at<T>(row, k + kLanes));
      _mm512_store_si512(line, x.high);
      if (parts == 2) _mm512_store_si512(line + kMatrixBytes, x.low);
    }
  }
}

// Chunks of a span of blocks as tiles: [blocks][kDepth][parts] of [16 pairs of columns][16 rows][2].
struct UnpackTiles {
  const PackedMatrix& matrix;
  int64_t first, end, chunk, chunks;
  int parts;
  char* to;

  template <Codes C, Grid G>
  void run() const {
    const __m512i pairs = _mm512_add_epi16(_mm512_srli_epi32(_mm512_slli_epi32((__m512i)iota(), 16), 16),
                                           _mm512_slli_epi32(_mm512_add_epi32((__m512i)iota(), _mm512_set1_epi32(16)), 16));
    vf w[kChunkCols];
    for (int64_t b = first; b < end; ++b)
      for (int64_t c = 0; c < chunks; ++c) {
        char* tile = to + ((b - first) * kDepth + c) * parts * kMatrixBytes;
        chunk_weights<C, G>(matrix, b, chunk + c, 0, w);
        for (int i = 0; i < kMatrixRows; ++i) {
          const PartsOfBF16 two((__m512)w[2 * i], (__m512)w[2 * i + 1]);
          _mm512_store_si512(tile + 64 * i, _mm512_permutexvar_epi16(pairs, two.high));
          if (parts == 2) _mm512_store_si512(tile + kMatrixBytes + 64 * i, _mm512_permutexvar_epi16(pairs, two.low));
        }
      }
  }
};

// Tiles of 32 rows of x and of two blocks of weights, and where their products are summed.
struct TileFactors {
  const char *x[2], *w[2];
  float* sums[2][2];
};

#define KVR_FOUR_PRODUCTS(a0, a1, b0, b1) \
  _tile_loadd(4, a0, 64);                 \
  _tile_loadd(6, b0, 64);                 \
  _tile_dpbf16ps(0, 4, 6);                \
  _tile_loadd(7, b1, 64);                 \
  _tile_dpbf16ps(1, 4, 7);                \
  _tile_loadd(5, a1, 64);                 \
  _tile_dpbf16ps(2, 5, 6);                \
  _tile_dpbf16ps(3, 5, 7);

// Adds the products of `chunks` chunks; X, W: parts of x and of the weights.
template <int X, int W>
KVR_KERNEL void tile_products(const TileFactors& f, int64_t chunks, bool are_first) {
  if (are_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, f.sums[0][0], 64);
    _tile_loadd(1, f.sums[0][1], 64);
    _tile_loadd(2, f.sums[1][0], 64);
    _tile_loadd(3, f.sums[1][1], 64);
  }
  const char *x0 = f.x[0], *x1 = f.x[1], *w0 = f.w[0], *w1 = f.w[1];
  for (int64_t c = 0; c < chunks; ++c) {
    if constexpr (W == 2) {
      KVR_FOUR_PRODUCTS(x0, x1, w0 + kMatrixBytes, w1 + kMatrixBytes)
    }
    if constexpr (X == 2) {
      KVR_FOUR_PRODUCTS(x0 + kMatrixBytes, x1 + kMatrixBytes, w0, w1)
    }
    KVR_FOUR_PRODUCTS(x0, x1, w0, w1)
    x0 += X * kMatrixBytes, x1 += X * kMatrixBytes, w0 += W * kMatrixBytes, w1 += W * kMatrixBytes;
  }
  _tile_stored(0, f.sums[0][0], 64);
  _tile_stored(1, f.sums[0][1], 64);
  _tile_stored(2, f.sums[1][0], 64);
  _tile_stored(3, f.sums[1][1], 64);
}
#undef KVR_FOUR_PRODUCTS

// A slab of x as tiles, and the call that it is of.
struct Slab {
  const PackedArgs& args;
  const char* x;
  int64_t first, rows;
};

// Sums of a span's blocks [rows / 16][kSpanBlocks] tiles -> y, with the bias.
inline void write_sums(const Slab& slab, const Share& span, const float* sums) {
  const PackedArgs& a = slab.args;
  const int64_t size = size_of(a.type);
  for (int64_t b = span.first; b < span.end; ++b) {
    const int64_t from = b * kBlockRows, at = span.col + from;
    const __mmask16 some = (__mmask16)((1u << std::min<int64_t>(kBlockRows, span.matrix->out - from)) - 1);
    __m512 bias = _mm512_setzero_ps();
    if (a.bias != nullptr && a.type == Type::kF32) bias = _mm512_maskz_loadu_ps(some, a.bias + at * size);
    if (a.bias != nullptr && a.type == Type::kBF16)
      bias = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, a.bias + at * size)), 16);
    for (int64_t r = 0; r < slab.rows; ++r) {
      const float* tile = sums + (r / kMatrixRows * kSpanBlocks + b - span.first) * kTileSums;
      const __m512 y = _mm512_add_ps(_mm512_load_ps(tile + r % kMatrixRows * kBlockRows), bias);
      char* to = a.y + ((slab.first + r) * a.out + at) * size;
      if (a.type == Type::kF32)
        _mm512_mask_storeu_ps(to, some, y);
      else
        _mm256_mask_storeu_epi16(to, some, _mm512_cvtepi32_epi16((__m512i)(round_bf16((vf)y) >> 16)));
    }
  }
}

template <int X, int W>
inline void span_times(const Slab& slab, const Share& span) {
  const PackedMatrix& m = *span.matrix;
  const int64_t chunks = m.in / kChunkCols, tiles = (slab.rows + kMatrixRows - 1) / kMatrixRows;
  const int64_t blocks = span.end - span.first, tile_step = chunks * X * kMatrixBytes;
  constexpr int64_t kBlockBytes = kDepth * W * kMatrixBytes;
  float* sums = thread_scratch(kSpanBlocks * kBlockBytes / 4 + (tiles + tiles % 2) * kSpanBlocks * kTileSums);
  char* w = reinterpret_cast<char*>(sums);
  sums += kSpanBlocks * kBlockBytes / 4;
  MatrixConfig config;
  config.set(0, 8, kMatrixRows, 64);
  _tile_loadconfig(&config);
  for (int64_t c = 0; c < chunks; c += kDepth) {
    const int64_t depth = std::min(kDepth, chunks - c);
    with_kind(m, UnpackTiles{m, span.first, span.end, c, depth, W, w});
    for (int64_t b = 0; b < blocks; b += 2)
      for (int64_t t = 0; t < tiles; t += 2) {
        // What is not there is read twice, and its sums are not taken.
        const char *x0 = slab.x + t * tile_step + c * X * kMatrixBytes, *w0 = w + b * kBlockBytes;
        float* to = sums + (t * kSpanBlocks + b) * kTileSums;
        float* next = to + kSpanBlocks * kTileSums;
        tile_products<X, W>({{x0, t + 1 < tiles ? x0 + tile_step : x0},
                             {w0, b + 1 < blocks ? w0 + kBlockBytes : w0},
                             {{to, to + kTileSums}, {next, next + kTileSums}}},
                            depth, c == 0);
      }
  }
  _tile_release();
  write_sums(slab, span, sums);
}

inline void tiled_linear(const PackedArgs& a) {
  const int64_t in = a.matrices[0]->in, threads = max_threads();
  const int w_parts = a.activations == Activations::kInt8 ? 1 : 2, x_parts = a.type == Type::kF32 ? w_parts : 1;
  const int64_t most = std::min(a.rows, kSlabRows), row_bytes = in * 2 * x_parts;
  char* x = reinterpret_cast<char*>(call_scratch((most + kMatrixRows) * row_bytes / 4));
  std::vector<Share> spans;
  for (int64_t i = 0, col = 0; i < a.count; col += a.matrices[i++]->out) {
    const int64_t blocks = (a.matrices[i]->out + kBlockRows - 1) / kBlockRows;
    const int64_t step = std::min(kSpanBlocks, (blocks / threads + 1) / 2 * 2 + 2);
    for (int64_t b = 0; b < blocks; b += step) spans.push_back({a.matrices[i], b, std::min(b + step, blocks), col});
  }
  for (int64_t first = 0; first < a.rows; first += kSlabRows) {
    const Slab slab{a, x, first, std::min(kSlabRows, a.rows - first)};
    parallel_for((slab.rows + kMatrixRows - 1) / kMatrixRows, [&](int64_t t) {
      char* to = x + t * kMatrixRows * row_bytes;
      if (a.type == Type::kBF16)
        tile_rows<Type::kBF16>(a, first + t * kMatrixRows, in, x_parts, to);
      else
        tile_rows<Type::kF32>(a, first + t * kMatrixRows, in, x_parts, to);
    });
    parallel_for((int64_t)spans.size(), [&](int64_t i) {
      if (w_parts == 1)
        span_times<1, 1>(slab, spans[i]);
      else if (x_parts == 1)
        span_times<1, 2>(slab, spans[i]);
      else
        span_times<2, 2>(slab, spans[i]);
    });
  }
}

}  // namespace kvreclaim::KVR_NS::packed_detail
#endif

#ifdef KVR_NS
namespace kvreclaim::KVR_NS {

inline void packed_linear(const PackedArgs& a) {
  if (a.rows == 0) return;
#ifdef KVR_MATRIX
  if (packed_detail::takes_tiles(a)) return packed_detail::tiled_linear(a);
#endif
  packed_detail::panel_linear(a);
}

}  // namespace kvreclaim::KVR_NS
#endif
