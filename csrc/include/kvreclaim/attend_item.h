// One work item: its queries, the loops over its tiles, and its sums.
#pragma once

#include "kvreclaim/fp8_item.h"
#include "kvreclaim/integer.h"
#include "kvreclaim/item.h"
#include "kvreclaim/matrix_item.h"
#include "kvreclaim/panel.h"

namespace kvreclaim::KVR_NS {

// One group of R rows over the tile at slot `at`.
template <int R, bool BF16>
inline void tile_rows(const AttentionArgs& a, const Item& item, int64_t at, const Tile& tile, const Ahead& ahead,
                      const TileMask& mask, RowGroup& group, float* scores) {
  const int64_t tokens = smaller(kTile, smaller(item.high, group.end[R - 1]) - at);
  if (tokens <= 0) return;
  row_scores<R, BF16>(a, item.seq, group.q, tile, ahead, scores);
  finish_scores<R>(a, item, group, at, mask, scores);
  float alpha[kMaxR];
  softmax_rows<R>(scores, group, alpha);
  const int64_t v_dim = a.cache.v_dim, row_bytes = v_dim * size_of(a.cache.formats.v);
  all_values<R, BF16>({tile, tokens, row_bytes / 4, row_bytes, group.acc, v_dim, scores, alpha, ahead});
}

// All rows of a head over the tile at slot `at`, `next` being fetched meanwhile.
template <bool BF16>
inline void tile_step(const AttentionArgs& a, const Item& item, int64_t at, const Tile& tile, const Tile& next,
                      HeadRows& to, float* scores) {
  TileMask mask;
  open_mask(a, item, at, mask);
  int64_t rows = 0, fetched = 0;
  for (int g = 0; g < to.count; ++g) {
    RowGroup& group = to.groups[g];
    rows += group.count;
    const Ahead ahead{next, fetched, kTile * rows / item.rows};
    fetched = ahead.end;
    switch (group.count) {
      case 1: tile_rows<1, BF16>(a, item, at, tile, ahead, mask, group, scores); break;
      case 2: tile_rows<2, BF16>(a, item, at, tile, ahead, mask, group, scores); break;
      case 3: tile_rows<3, BF16>(a, item, at, tile, ahead, mask, group, scores); break;
      case 4: tile_rows<4, BF16>(a, item, at, tile, ahead, mask, group, scores); break;
      default: tile_rows<kMaxR, BF16>(a, item, at, tile, ahead, mask, group, scores);
    }
  }
}

// Heads item.head .. item.head + run of an item, tile by tile; leaves their sums in `heads`.
template <bool BF16>
inline void run_tiles(const AttentionArgs& a, const Item& item, int64_t run, HeadRows* heads) {
  alignas(64) float scores[kMaxR * kTile];
  const int64_t floats = group_floats(a.cache, item.rows);
  float* memory = thread_scratch(run * floats);
  for (int64_t h = 0; h < run; ++h) open_groups(a, of_head(item, h), memory + h * floats, heads[h]);
  Tile tile, next;
  open_tile(a, item, first_tile(a, item), tile);
  for (int64_t at = first_tile(a, item); at < item.high; at += kTile)
    for (int64_t h = 0; h < run; ++h, tile = next) {
      const bool last = h + 1 == run;
      open_tile(a, of_head(item, last ? 0 : h + 1), last ? smaller(at + kTile, item.high - 1) : at, next);
      tile_step<BF16>(a, of_head(item, h), at, tile, next, heads[h], scores);
    }
}

inline void run_panels(const AttentionArgs& a, const Item& item, HeadRows& to) {
  const int64_t floats = group_floats(a.cache, item.rows);
  float* memory = thread_scratch(floats + panel_floats(a.cache));
  open_groups(a, item, memory, to);
  run_panels(a, item, to.groups, to.count, memory + floats);
}

// partials: where the item's rows go if other items hold other parts of their keys, else null.
inline void close_groups(const AttentionArgs& a, const Item& item, const RowGroup* groups, int count,
                         float* partials) {
  const int64_t v_dims = a.cache.v_dim;
  const RowMap map = row_map(item.seq, item.head, group_size(a));
  int64_t row = 0;
  for (int g = 0; g < count; ++g)
    for (int64_t j = 0; j < groups[g].count; ++j, ++row) {
      const Sums sums{groups[g].m[j], hsum(groups[g].sum[j]), groups[g].acc + j * v_dims};
      if (partials == nullptr) {
        write_row(a, map, item.row + row, sums);
      } else {
        float* partial = partials + row * (v_dims + 2);
        partial[0] = sums.m;
        partial[1] = sums.weight;
        std::memcpy(partial + 2, sums.acc, v_dims * sizeof(float));
      }
    }
}

// Few rows over a cache that is read as it lies: what counts is how a thread walks through memory.
KVR_INLINE bool takes_tiles(const AttentionArgs& a, const SequenceView& seq) {
  return reads_direct(a.cache) && deciding_rows(a, seq) <= kRowBlock;
}

// What a part costs before its first token, and how its pieces lie in memory, counts.
KVR_INLINE bool takes_long_parts(const AttentionArgs& a, const SequenceView& seq) {
  return takes_matrices(a) || takes_integers(a, seq) || takes_tiles(a, seq) || takes_fp8(a, seq);
}

// Heads of an item: those that the loops below take together.
KVR_INLINE int64_t item_heads(const AttentionArgs& a, const SequenceView& seq) {
  return takes_long_parts(a, seq) ? head_run(a.cache) : 1;
}

// An item of `run` heads, the first of which is item.head; is_decode: one of few rows, as matrices tell them.
inline void run_item(const AttentionArgs& a, const Item& item, int64_t run, bool is_decode, float* partials) {
  HeadRows heads[kMaxRun];
  if (takes_matrices(a))
    run_matrices(a, item, run, is_decode, heads);
  else if (takes_integers(a, item.seq))
    run_integers(a, item, run, heads);
  else if (takes_fp8(a, item.seq))
    run_fp8(a, item, run, heads);
  else if (!reads_direct(a.cache))
    run_panels(a, item, heads[0]);
  else if (a.cache.formats.k == Format::kBF16)
    run_tiles<true>(a, item, run, heads);
  else
    run_tiles<false>(a, item, run, heads);
  const int64_t step = item.seq.query_len * group_size(a) * (a.cache.v_dim + 2);
  for (int64_t h = 0; h < run; ++h)
    close_groups(a, of_head(item, h), heads[h].groups, heads[h].count,
                 partials == nullptr ? nullptr : partials + h * step);
}

}  // namespace kvreclaim::KVR_NS
