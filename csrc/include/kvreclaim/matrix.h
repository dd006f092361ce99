// Attention over bf16 caches by matrix tiles (AMX), for CPUs that have them: what attend_item.h's loops over a tile
// of tokens compute with vectors, for up to 16 query rows at once.
//
// A matrix tile is 16 rows of 64 bytes. A key block is one as it lies: pairs of dims by slots. Values are laid in
// pairs of tokens first, once per tile of tokens for all rows. Products of bf16 are exact and sums fp32; queries
// that are not bf16, and the softmax's weights, go in as two bf16 numbers each, 16 bits of mantissa, so that
// nothing is rounded to 8. A row's sums do not depend on the rows beside it.
#pragma once

#include "kvreclaim/item.h"
#include "kvreclaim/matrix_tiles.h"

#ifdef KVR_MATRIX

namespace kvreclaim::KVR_NS {

constexpr int64_t kMatrixMaxDims = 512;

KVR_INLINE bool takes_matrices(const AttentionArgs& a) {
  const CacheView& c = a.cache;
  return c.formats.k == Format::kBF16 && !c.latent && c.k_dim % kMatrixDims == 0 && c.v_dim % kMatrixDims == 0 &&
         c.k_dim <= kMatrixMaxDims && c.v_dim <= kMatrixMaxDims;
}

// Rows that go through the matrix tiles together: two groups of kMaxR, or fewer.
struct MatrixRows {
  const char* q;     // [parts][16][D] bf16
  int parts;         // numbers that a query's is the sum of
  float* scores;     // [16][kTile]
  char* p;           // [2][2][16][32] bf16: halves of the tile; high parts and low parts of the weights
  float* acc;        // [16][Dv], groups of 32 dims in interleave's order
};

// One product of the factors in tiles 4 (and 5) with the tile at `from`, into tile `sum`.
#define KVR_MATRIX_STEP(sum, factor, from, stride, both)  \
  _tile_loadd(factor, from, stride);                      \
  _tile_dpbf16ps(sum, 4, factor);                         \
  if (both) _tile_dpbf16ps(sum, 5, factor);

// Fetches the tile that is next, 16 lines at a time between the steps of this one: in bursts they would wait for
// each other, and memory would rest in between. Into the second cache: the first has room for one tile.
struct Feeder {
  const char* pieces[2 * kChunks * kMatrixMaxDims / kMatrixDims];
  int keys, count, done;
  int64_t k_stride;

  KVR_INLINE void feed() {
    if (done == count) return;
    const char* at = pieces[done];
    const int64_t stride = done++ < keys ? k_stride : 64;
#pragma GCC unroll 16
    for (int line = 0; line < 16; ++line) __builtin_prefetch(at + line * stride, 0, 2);
  }
};

KVR_INLINE void open_feeder(const CacheView& c, const Tile& tile, Feeder& to) {
  to.keys = to.done = 0;
  to.k_stride = k_word_stride(c);
  for (int i = 0; i < kChunks; ++i)
    for (int64_t w = 0; w < c.k_dim / 2; w += 16) to.pieces[to.keys++] = tile.k[i] + w * to.k_stride;
  to.count = to.keys;
  for (int i = 0; i < kChunks; ++i)
    for (int64_t b = 0; b < 32 * c.v_dim; b += 1024) to.pieces[to.count++] = tile.v[i] + b;
}

// Unscaled scores of all rows and all tokens of the tile.
KVR_KERNEL void matrix_scores(const MatrixRows& rows, const Tile& tile, Feeder& next, int64_t dims, int64_t stride) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const bool both = rows.parts == 2;
  const char* q = rows.q;
  int64_t at = 0;
  for (int64_t d = 0; d < dims; d += kMatrixDims, q += 2 * kMatrixDims, at += kMatrixRows * stride) {
    _tile_loadd(4, q, 2 * dims);
    if (both) _tile_loadd(5, q + 2 * kMatrixRows * dims, 2 * dims);
    KVR_MATRIX_STEP(0, 6, tile.k[0] + at, stride, both)
    KVR_MATRIX_STEP(1, 7, tile.k[1] + at, stride, both)
    next.feed();
    KVR_MATRIX_STEP(2, 6, tile.k[2] + at, stride, both)
    KVR_MATRIX_STEP(3, 7, tile.k[3] + at, stride, both)
    next.feed();
  }
  constexpr int64_t step = kTile * sizeof(float);
  _tile_stored(0, rows.scores, step);
  _tile_stored(1, rows.scores + 16, step);
  _tile_stored(2, rows.scores + 32, step);
  _tile_stored(3, rows.scores + 48, step);
}

// The tile's values in pairs of tokens: [2 halves][Dv / 16] matrix tiles of [16 pairs][16 dims][2]. Of 32 dims the
// first matrix tile has 0-3, 8-11, 16-19 and 24-27, the second the others. Tokens past the last are zero.
KVR_KERNEL void interleave_values(const Tile& tile, Feeder& next, int64_t tokens, int64_t v_dim, char* to) {
  const int64_t half_bytes = v_dim / kMatrixRows * kMatrixBytes, row_bytes = 2 * v_dim;
  for (int64_t t = 0; t < tokens; t += 2) {
    const char* first = tile.v[t / kChunk] + t % kChunk * row_bytes;
    const bool has_second = t + 1 < tokens;
    char* row = to + t / 32 * half_bytes + t % 32 / 2 * 64;
    for (int64_t d = 0; d < v_dim; d += kMatrixDims, row += 2 * kMatrixBytes) {
      const __m512i a = _mm512_loadu_si512(first + 2 * d);
      const __m512i b = has_second ? _mm512_loadu_si512(first + row_bytes + 2 * d) : _mm512_setzero_si512();
      _mm512_store_si512(row, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(row + kMatrixBytes, _mm512_unpackhi_epi16(a, b));
      if (t % 8 == 0 && d % 64 == 0) next.feed();
    }
  }
  for (int64_t t = div_up(tokens, 2) * 2; t % 32 != 0; t += 2)
    for (int64_t tile16 = 0; tile16 < v_dim / kMatrixRows; ++tile16)
      _mm512_store_si512(to + t / 32 * half_bytes + tile16 * kMatrixBytes + t % 32 / 2 * 64, _mm512_setzero_si512());
}

// The weights of `count` rows, in two parts.
KVR_INLINE void split_weights(const MatrixRows& rows, int64_t count) {
  for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const float* s = rows.scores + r * kTile + half * 32;
      const PartsOfBF16 weights(_mm512_loadu_ps(s), _mm512_loadu_ps(s + 16));
      char* to = rows.p + half * 2 * kMatrixBytes + r * 64;
      _mm512_store_si512(to, weights.high);
      _mm512_store_si512(to + kMatrixBytes, weights.low);
    }
}

// acc += weights x values, for C matrix tiles of dims from `dim` on.
template <int C>
KVR_INLINE void matrix_values_at(const MatrixRows& rows, const char* values, Feeder& next, int halves, int64_t v_dim,
                                 int64_t dim) {
  const int64_t step = v_dim * sizeof(float), half_bytes = v_dim / kMatrixRows * kMatrixBytes;
  float* acc = rows.acc + dim;
  values += dim / kMatrixRows * kMatrixBytes;
  _tile_loadd(0, acc, step);
  _tile_loadd(1, acc + 16, step);
  if constexpr (C == 4) {
    _tile_loadd(2, acc + 32, step);
    _tile_loadd(3, acc + 48, step);
  }
  for (int half = 0; half < halves; ++half, values += half_bytes) {
    _tile_loadd(4, rows.p + half * 2 * kMatrixBytes, 64);
    _tile_loadd(5, rows.p + half * 2 * kMatrixBytes + kMatrixBytes, 64);
    KVR_MATRIX_STEP(0, 6, values, 64, true)
    KVR_MATRIX_STEP(1, 7, values + kMatrixBytes, 64, true)
    next.feed();
    if constexpr (C == 4) {
      KVR_MATRIX_STEP(2, 6, values + 2 * kMatrixBytes, 64, true)
      KVR_MATRIX_STEP(3, 7, values + 3 * kMatrixBytes, 64, true)
      next.feed();
    }
  }
  _tile_stored(0, acc, step);
  _tile_stored(1, acc + 16, step);
  if constexpr (C == 4) {
    _tile_stored(2, acc + 32, step);
    _tile_stored(3, acc + 48, step);
  }
}

KVR_KERNEL void matrix_values(const MatrixRows& rows, const char* values, Feeder& next, int64_t tokens, int64_t v_dim) {
  const int halves = tokens > 32 ? 2 : 1;
  int64_t dim = 0;
  for (; dim + 64 <= v_dim; dim += 64) matrix_values_at<4>(rows, values, next, halves, v_dim, dim);
  if (dim < v_dim) matrix_values_at<2>(rows, values, next, halves, v_dim, dim);
}

// Decode: values are read as they lie, a row of a matrix tile being 32 dims of a token. A weight p stands in it as
// (p, 0) for the sums of even dims and as (0, p) for those of odd ones, in a high and in a low part: four rows
// are the 16 of a matrix tile. It takes twice the products of pairs of tokens, but no work on the values.
constexpr int kQuad = 4;

// Weights of up to four rows: [kChunks] matrix tiles of [high even, high odd, low even, low odd][4 rows][16 tokens].
KVR_INLINE void quad_weights(const float* scores, int64_t count, char* p) {
  for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kChunks; ++c) {
      const __m512 x = _mm512_loadu_ps(scores + r * kTile + c * kChunk);
      const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), odd = _mm512_slli_epi32(high, 16);
      const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(x, (__m512)odd)));
      char* to = p + c * kMatrixBytes + r * 64;
      _mm512_store_si512(to, high);
      _mm512_store_si512(to + kQuad * 64, odd);
      _mm512_store_si512(to + 2 * kQuad * 64, low);
      _mm512_store_si512(to + 3 * kQuad * 64, _mm512_slli_epi32(low, 16));
    }
}

// Unscaled scores as matrix_scores', of as many rows as the first three matrix tiles have.
KVR_KERNEL void decode_scores(const MatrixRows& rows, const Tile& tile, Feeder& next, int64_t dims, int64_t stride) {
  constexpr int64_t step = kTile * sizeof(float);
#pragma GCC unroll 2
  for (int c = 0; c < kChunks; c += 2) {
    const char* q = rows.q;
    int64_t at = 0;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = 0; d < dims; d += kMatrixDims, q += 2 * kMatrixDims, at += kMatrixRows * stride) {
      _tile_loadd(2, q, 2 * dims);
      _tile_loadd(3, tile.k[c] + at, stride);
      _tile_dpbf16ps(0, 2, 3);
      next.feed();
      _tile_loadd(7, tile.k[c + 1] + at, stride);
      _tile_dpbf16ps(1, 2, 7);
      next.feed();
      if (rows.parts == 2) {
        _tile_loadd(2, q + 2 * kMatrixRows * dims, 2 * dims);
        _tile_dpbf16ps(0, 2, 3);
        _tile_dpbf16ps(1, 2, 7);
      }
    }
    _tile_stored(0, rows.scores + c * kChunk, step);
    _tile_stored(1, rows.scores + (c + 1) * kChunk, step);
  }
}

// acc [Dv / 32][16][16] += weights x values of a quad.
KVR_KERNEL void quad_values(const char* p, const char* const* v, Feeder& next, int64_t tokens, int64_t v_dim,
                            float* acc) {
  const int chunks = (int)div_up(tokens, kChunk);
  const int64_t tiles = v_dim / kMatrixDims;
  for (int64_t t = 0; t < tiles; t += 2, acc += 512) {
    const bool both = t + 1 < tiles;
    _tile_loadd(4, acc, 64);
    if (both) _tile_loadd(5, acc + 256, 64);
    for (int c = 0; c < chunks; ++c) {
      _tile_loadd(6, p + c * kMatrixBytes, 64);
      _tile_loadd(3, v[c] + t * 64, 2 * v_dim);
      _tile_dpbf16ps(4, 6, 3);
      next.feed();
      if (!both) continue;
      _tile_loadd(7, v[c] + t * 64 + 64, 2 * v_dim);
      _tile_dpbf16ps(5, 6, 7);
      next.feed();
    }
    _tile_stored(4, acc, 64);
    if (both) _tile_stored(5, acc + 256, 64);
  }
}
#undef KVR_MATRIX_STEP

}  // namespace kvreclaim::KVR_NS
#endif
