// One work item of attention by matrix tiles (matrix.h).
#pragma once

#include "kvreclaim/matrix.h"
#include "kvreclaim/rows.h"

#ifdef KVR_MATRIX

namespace kvreclaim::KVR_NS {

// Softmax of a group's R rows, whose unscaled scores lie at `scores`.
template <int R>
inline void matrix_softmax(const AttentionArgs& a, const Item& item, int64_t at, const TileMask& mask,
                           RowGroup& group, float* scores, float* alpha) {
  const float scale = query_scale(a);
  for (int i = 0; i < R * kTile; i += kLanes) store(scores + i, load<vf>(scores + i) * scale);
  finish_scores<R>(a, item, group, at, mask, scores);
  softmax_rows<R>(scores, group, alpha);
}

inline void group_softmax(const AttentionArgs& a, const Item& item, int64_t at, const TileMask& mask, RowGroup& group,
                          float* scores, float* alpha) {
  switch (group.count) {
    case 1: return matrix_softmax<1>(a, item, at, mask, group, scores, alpha);
    case 2: return matrix_softmax<2>(a, item, at, mask, group, scores, alpha);
    case 3: return matrix_softmax<3>(a, item, at, mask, group, scores, alpha);
    case 4: return matrix_softmax<4>(a, item, at, mask, group, scores, alpha);
    default: return matrix_softmax<kMaxR>(a, item, at, mask, group, scores, alpha);
  }
}

inline void scale_row(float* row, int64_t dims, float factor) {
  for (int64_t d = 0; d < dims; d += kLanes) store(row + d, load<vf>(row + d) * factor);
}

// A row of q as `parts` rows of bf16, 16 rows apart.
inline void pack_matrix_query(const float* row, int64_t dims, int parts, uint16_t* to) {
  for (int64_t d = 0; d < dims; ++d) {
    to[d] = to_bf16(row[d]);
    if (parts == 2) to[kMatrixRows * dims + d] = to_bf16(row[d] - from_bf16(to[d]));
  }
}

// interleave_values' order of dims -> that of write_dims.
inline void order_dims(float* acc, int64_t dims) {
  const __m512i evens = _mm512_setr_epi32(0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30);
  for (int64_t d = 0; d < dims; d += kMatrixDims) {
    const __m512 a = _mm512_loadu_ps(acc + d), b = _mm512_loadu_ps(acc + d + 16);
    _mm512_storeu_ps(acc + d, _mm512_permutex2var_ps(a, evens, b));
    _mm512_storeu_ps(acc + d + 16, _mm512_permutex2var_ps(a, _mm512_add_epi32(evens, _mm512_set1_epi32(1)), b));
  }
}

// A head's rows on their way through an item.
struct MatrixHead {
  float* acc;  // prefill: [rows, a multiple of 16][Dv]; decode: of each quad [Dv / 32][16][16], behind them [rows][Dv]
  float* q;    // of each 16 rows: [parts][16][D] bf16
};

// What the loops of an item share.
struct MatrixScratch {
  bool is_decode;
  int parts;
  int64_t rows, q_floats, acc_floats;  // rows: a multiple of 16; floats of 16 rows, and of all
  float *scores, *spare;
  char *p, *values;  // values: prefill only
};

inline int64_t quad_floats(const CacheView& c) { return c.v_dim / kMatrixDims * kMatrixRows * 16; }

inline void open_matrix_head(const AttentionArgs& a, const Item& item, const MatrixScratch& scratch, HeadRows& to,
                             MatrixHead& head) {
  const int64_t dims = a.cache.k_dim, v_dims = a.cache.v_dim;
  const RowMap map = row_map(item.seq, item.head, group_size(a));
  float* sums = scratch.is_decode ? head.acc + div_up(item.rows, kQuad) * quad_floats(a.cache) : head.acc;
  std::memset(head.acc, 0, scratch.acc_floats * sizeof(float));
  std::memset(head.q, 0, scratch.rows / kMatrixRows * scratch.q_floats * sizeof(float));
  to.count = 0;
  for (int64_t r = 0; r < item.rows; r += to.groups[to.count++].count) {
    RowGroup& group = to.groups[to.count];
    group.count = group_rows(item.rows - r);
    group.acc = sums + r * v_dims;
    reset(group, v_dims);
    open_bounds(a, item, item.row + r, group);
    for (int64_t j = r; j < r + group.count; ++j) {
      unpack_row(a.q, row_address(a.q, map, item.row + j), dims, 1.0f, scratch.spare, 1);
      uint16_t* block = reinterpret_cast<uint16_t*>(head.q + j / kMatrixRows * scratch.q_floats);
      pack_matrix_query(scratch.spare, dims, scratch.parts, block + j % kMatrixRows * dims);
    }
  }
}

// Up to 16 rows of a head over the tile at slot `at`.
struct MatrixStep {
  const AttentionArgs& a;
  const Item& item;
  int64_t at;
  const Tile& tile;
  const TileMask& mask;
  MatrixRows rows;
  RowGroup* groups;
  int count;

  // Tokens of the tile that any of the rows sees.
  int64_t tokens() const {
    const RowGroup& last = groups[count - 1];
    return smaller(kTile, smaller(item.high, last.end[last.count - 1]) - at);
  }

  // Scores -> weights; alpha [rows]. Returns how many rows there are.
  int64_t softmax(Feeder& next, float* alpha) const {
    int64_t row = 0;
    for (int g = 0; g < count; row += groups[g++].count) {
      next.feed();
      float own[kMaxR];
      group_softmax(a, item, at, mask, groups[g], rows.scores + row * kTile, own);
      for (int64_t r = 0; r < groups[g].count; ++r) alpha[row + r] = own[r];
    }
    return row;
  }
};

inline void prefill_step(const MatrixStep& step, const char* values, Feeder& next) {
  const CacheView& c = step.a.cache;
  if (step.tokens() <= 0) return;
  matrix_scores(step.rows, step.tile, next, c.k_dim, k_word_stride(c));
  float alpha[kMatrixRows];
  const int64_t rows = step.softmax(next, alpha);
  for (int64_t r = 0; r < rows; ++r)
    if (alpha[r] != 1.0f) scale_row(step.rows.acc + r * c.v_dim, c.v_dim, alpha[r]);
  split_weights(step.rows, rows);
  matrix_values(step.rows, values, next, step.tokens(), c.v_dim);
}

inline void decode_step(const MatrixStep& step, const char* const* v, Feeder& next) {
  const CacheView& c = step.a.cache;
  if (step.tokens() <= 0) return;
  decode_scores(step.rows, step.tile, next, c.k_dim, k_word_stride(c));
  float alpha[kMatrixRows];
  const int64_t rows = step.softmax(next, alpha), size = quad_floats(c);
  float* acc = step.rows.acc;
  for (int64_t first = 0; first < rows; first += kQuad, acc += size) {
    const int64_t count = smaller(kQuad, rows - first);
    for (int64_t r = 0; r < count; ++r)
      if (alpha[first + r] != 1.0f)
        for (float* row = acc + r * 16; row < acc + size; row += kQuad * 16) scale_row(row, 16, alpha[first + r]);
    quad_weights(step.rows.scores + first * kTile, count, step.rows.p);
    quad_values(step.rows.p, v, next, step.tokens(), c.v_dim, acc);
  }
}

// A copy of the tile's last chunk of values, what lies behind the last token being zero.
inline void copy_values(const Tile& tile, int64_t tokens, int64_t v_dim, char* to) {
  const int64_t own = tokens % kChunk * 2 * v_dim;
  std::memcpy(to, tile.v[tokens / kChunk], own);
  std::memset(to + own, 0, kChunk * 2 * v_dim - own);
}

// All rows of a head over the tile at slot `at`, `next` being fetched meanwhile.
inline void matrix_tile(const AttentionArgs& a, const Item& item, int64_t at, const Tile& tile,
                        const MatrixScratch& scratch, HeadRows& to, const MatrixHead& head, Feeder& next) {
  const int64_t v_dim = a.cache.v_dim, tokens = smaller(kTile, item.high - at);
  TileMask mask;
  open_mask(a, item, at, mask);
  const char* v[kChunks] = {tile.v[0], tile.v[1], tile.v[2], tile.v[3]};
  if (!scratch.is_decode) {
    interleave_values(tile, next, tokens, v_dim, scratch.values);
  } else if (tokens % kChunk != 0) {
    copy_values(tile, tokens, v_dim, scratch.values);
    v[tokens / kChunk] = scratch.values;
  }
  const int64_t row_floats = scratch.is_decode ? quad_floats(a.cache) / kQuad : v_dim;
  for (int64_t row = 0, g = 0, count = 0; row < item.rows; row += kMatrixRows, g += count) {
    count = 0;
    for (int64_t r = row; r < smaller(row + kMatrixRows, item.rows); ++count) r += to.groups[g + count].count;
    const MatrixRows rows{reinterpret_cast<char*>(head.q + row / kMatrixRows * scratch.q_floats), scratch.parts,
                          scratch.scores, scratch.p, head.acc + row * row_floats};
    const MatrixStep step{a, item, at, tile, mask, rows, to.groups + g, (int)count};
    scratch.is_decode ? decode_step(step, v, next) : prefill_step(step, scratch.values, next);
  }
}

// Leaves a head's sums where its groups look for them, in write_dims' order.
inline void close_matrix_head(const AttentionArgs& a, const Item& item, bool is_decode, const HeadRows& to,
                              const MatrixHead& head) {
  const int64_t v_dim = a.cache.v_dim, size = quad_floats(a.cache);
  for (int64_t r = 0; r < item.rows; ++r) {
    float* sums = to.groups[0].acc + r * v_dim;
    if (!is_decode) {
      order_dims(sums, v_dim);
      continue;
    }
    const float* from = head.acc + r / kQuad * size + r % kQuad * 16;
    for (int64_t d = 0; d < v_dim; d += kMatrixDims, from += 256) {
      store(sums + d, load<vf>(from) + load<vf>(from + 2 * kQuad * 16));
      store(sums + d + 16, load<vf>(from + kQuad * 16) + load<vf>(from + 3 * kQuad * 16));
    }
  }
}

// Heads item.head .. item.head + run of an item, tile by tile; leaves their sums in `heads`.
inline void run_matrices(const AttentionArgs& a, const Item& item, int64_t run, bool is_decode, HeadRows* heads) {
  const int64_t dims = a.cache.k_dim, v_dims = a.cache.v_dim;
  MatrixScratch scratch;
  scratch.is_decode = is_decode;
  scratch.rows = div_up(item.rows, kMatrixRows) * kMatrixRows;
  scratch.parts = a.q.type == Type::kBF16 ? 1 : 2;
  scratch.q_floats = kMatrixRows * dims / 2 * scratch.parts;
  scratch.acc_floats = scratch.rows * v_dims + (is_decode ? div_up(item.rows, kQuad) * quad_floats(a.cache) : 0);
  const int64_t head_floats = scratch.acc_floats + scratch.rows / kMatrixRows * scratch.q_floats;
  const int64_t p_floats = kChunks * kMatrixBytes / sizeof(float), score_floats = kMatrixRows * kTile;
  float* own = thread_scratch(run * head_floats + kTile * v_dims / 2 + p_floats + score_floats + dims);
  scratch.scores = own + run * head_floats;
  scratch.p = reinterpret_cast<char*>(scratch.scores + score_floats);
  scratch.values = scratch.p + kChunks * kMatrixBytes;
  scratch.spare = scratch.scores + score_floats + p_floats + kTile * v_dims / 2;
  std::memset(scratch.p, 0, kChunks * kMatrixBytes);
  MatrixHead parts[kMaxRun];
  for (int64_t h = 0; h < run; ++h, own += head_floats) {
    parts[h] = {own, own + scratch.acc_floats};
    open_matrix_head(a, of_head(item, h), scratch, heads[h], parts[h]);
  }
  MatrixConfig config;
  config.set(0, 8, kMatrixRows, 64);
  if (is_decode) config.set(0, 3, smaller(item.rows, kMatrixRows), 64);
  _tile_loadconfig(&config);
  Tile tile, next;
  Feeder feeder;
  for (int64_t at = first_tile(a, item); at < item.high; at += kTile)
    for (int64_t h = 0; h < run; ++h) {
      const Item mine = of_head(item, h);
      open_tile(a, mine, at, tile);
      open_tile(a, mine, smaller(at + kTile, item.high - 1), next);
      open_feeder(a.cache, next, feeder);
      matrix_tile(a, mine, at, tile, scratch, heads[h], parts[h], feeder);
    }
  _tile_release();
  for (int64_t h = 0; h < run; ++h) close_matrix_head(a, of_head(item, h), is_decode, heads[h], parts[h]);
}

}  // namespace kvreclaim::KVR_NS
#else
namespace kvreclaim::KVR_NS {
KVR_INLINE bool takes_matrices(const AttentionArgs&) { return false; }
inline void run_matrices(const AttentionArgs&, const Item&, int64_t, bool, HeadRows*) {}
}  // namespace kvreclaim::KVR_NS
#endif
