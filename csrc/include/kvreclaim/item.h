// A work item of attention, what each of its rows may see, and which loops run it.
#pragma once

#include "kvreclaim/attention_args.h"
#include "kvreclaim/memory.h"
#include "kvreclaim/rows.h"
#include "kvreclaim/tile.h"

namespace kvreclaim::KVR_NS {

constexpr int64_t kRowBlock = 64;     // query rows of one item
constexpr int64_t kMaxRows = 256;     // the same where keys are cut: all heads of a latent cache, drafts of a step
constexpr int64_t kMaxGroups = kMaxRows / kMaxR + 2;

KVR_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
KVR_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
KVR_INLINE int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows [row, row + rows) of a KV head over slots [low, high).
struct Item {
  const SequenceView& seq;
  int64_t head, row, rows, low, high;
};

// KV heads that a thread takes through the tiles together: what it reads of a block is then one piece of at least
// kPiece bytes, which the CPU fetches ahead by itself; of shorter ones it would fetch ahead into another head's.
constexpr int64_t kPiece = 8192, kMaxRun = 4;
KVR_INLINE int64_t head_run(const CacheView& c) {
  const int64_t bytes = is_plain(c.formats) ? k_block_bytes(c) : unit_bytes(c);
  int64_t run = 1;
  while (run < kMaxRun && c.heads % (2 * run) == 0 && run * bytes < kPiece) run *= 2;
  return run;
}

// Head `h` of an item's run.
KVR_INLINE Item of_head(const Item& item, int64_t h) {
  return {item.seq, item.head + h, item.row, item.rows, item.low, item.high};
}

// A head's rows of an item, as groups.
struct HeadRows {
  RowGroup groups[kMaxGroups];
  int count;
};

KVR_INLINE int64_t group_size(const AttentionArgs& a) { return a.num_heads / a.cache.heads; }

// Query rows of a KV head that decide which loops run: those of one query where a few have to equal it.
KVR_INLINE int64_t deciding_rows(const AttentionArgs& a, const SequenceView& seq) {
  return (seq.query_len <= kExactQueries ? 1 : seq.query_len) * group_size(a);
}

// First slot that query `i` can see, and one past the last.
KVR_INLINE int64_t first_slot(const AttentionArgs& a, const SequenceView& seq, int64_t i) {
  if (a.window == 0 || seq.positions.data != nullptr) return 0;
  return larger(0, seq.seq_len - seq.query_len + i - a.window + 1);
}
KVR_INLINE int64_t end_slot(const SequenceView& seq, int64_t i) { return seq.seq_len - seq.query_len + i + 1; }

// First tile of an item.
KVR_INLINE int64_t first_tile(const AttentionArgs& a, const Item& item) {
  return larger(item.low, first_slot(a, item.seq, item.row / group_size(a))) / kTile * kTile;
}

// fp32 and bf16 are read as they lie; everything else goes through panels of fp32 (panel.h) or, for decode over
// 8 and 4 bit integers, through integer products (integer.h).
KVR_INLINE bool reads_direct(const CacheView& c) {
  return (c.formats.k == Format::kF32 || c.formats.k == Format::kBF16) && !c.latent;
}

// Fills the addresses of slots [at, at + kTile) of an item in a cache that is read as it lies.
inline void open_tile(const AttentionArgs& a, const Item& item, int64_t at, Tile& tile) {
  const int64_t size = a.cache.block_size;
  for (int c = 0; c < kChunks; ++c) {
    const int64_t slot = smaller(at + c * kChunk, (item.high - 1) / kChunk * kChunk);
    const int64_t block = item.seq.block_ids[slot / size], offset = slot % size;
    tile.k[c] = k_block(a.cache, a.layer, block, item.head) + offset * 4;
    tile.v[c] = v_block(a.cache, a.layer, block, item.head) + offset * a.cache.v_dim * size_of(a.cache.formats.v);
  }
}

inline void open_mask(const AttentionArgs& a, const Item& item, int64_t at, TileMask& mask) {
  const SlotPositions& known = item.seq.positions;
  mask.has_positions = a.window != 0 && known.data != nullptr;
  if (mask.has_positions) {
    const int32_t* table = known.data + a.layer * known.stride_layer + item.head * known.stride_head;
    for (int64_t t = 0; t < kTile; ++t)
      mask.positions[t] = at + t < known.slots ? table[at + t] : (int32_t)(at + t + item.seq.shift);
  }
}

// What a row of a group sees of the tile at slot `at`; `hides`: not all of it.
KVR_INLINE RowBounds bounds_of(const AttentionArgs& a, const Item& item, const RowGroup& group, int64_t r, int64_t at,
                               const TileMask& mask, bool& hides) {
  const int64_t low = group.low[r] - at, end = smaller(item.high, group.end[r]) - at;
  hides = end < kTile || low > 0 || mask.has_positions;
  const int64_t first_position = group.end[r] + item.seq.shift - a.window;
  return {(int32_t)larger(low, 0), (int32_t)larger(end, 0), (int32_t)first_position};
}

// Softcap and masks on a group's scores of the tile at slot `at`, in log2 units.
template <int R>
inline void finish_scores(const AttentionArgs& a, const Item& item, const RowGroup& group, int64_t at,
                          const TileMask& mask, float* scores) {
  const bool sees_all = group.low[R - 1] <= at && at + kTile <= smaller(item.high, group.end[0]);
  if (sees_all && a.softcap == 0 && !mask.has_positions) return;
  for (int r = 0; r < R; ++r) {
    float* s = scores + r * kTile;
    if (a.softcap != 0) softcap_row(s, a.softcap * kLog2e);
    bool hides;
    const RowBounds bounds = bounds_of(a, item, group, r, at, mask, hides);
    if (hides) mask_row(s, bounds, mask);
  }
}

// Rows that go through the tiles together: as many as have a loop of their own.
KVR_INLINE int64_t group_rows(int64_t left) { return left >= kMaxR ? kMaxR : smaller(left, 4); }

// What q is multiplied with: scores come out in log2 units, or as the argument of tanh.
KVR_INLINE float query_scale(const AttentionArgs& a) {
  return a.softcap != 0 ? a.scale / a.softcap : a.scale * kLog2e;
}

// Keys and queries of few rows are multiplied as the bf16 that they are, two dims at a time, where the CPU does: that
// saves their conversion. With many rows, which share it, Intel's are no faster so.
KVR_INLINE bool takes_pairs(const AttentionArgs& a, const SequenceView& seq) {
#if defined(__AVX512BF16__)
  return a.cache.formats.k == Format::kBF16 && a.q.type == Type::kBF16 && reads_direct(a.cache) &&
         deciding_rows(a, seq) <= kRowBlock;
#else
  (void)a, (void)seq;
  return false;
#endif
}

// Numbers of fp8 are bf16, too (fp8_item.h).
KVR_INLINE bool takes_fp8(const AttentionArgs& a, const SequenceView& seq) {
#if defined(__AVX512BF16__)
  const CacheView& c = a.cache;
  return c.formats.k == Format::kFP8 && !c.latent && a.q.type == Type::kBF16 && c.v_dim % kLanes == 0 &&
         deciding_rows(a, seq) <= kRowBlock;
#else
  (void)a, (void)seq;
  return false;
#endif
}

// Queries of a group's rows, as pairs of bf16 or scaled in fp32; `spare` holds a row.
inline void load_rows(const AttentionArgs& a, const RowMap& map, int64_t row, bool as_pairs, RowGroup& group,
                      float* spare) {
  if (!as_pairs) return load_queries(a.q, a.cache, map, row, query_scale(a), group, spare);
  uint16_t* pairs = reinterpret_cast<uint16_t*>(group.q);
  for (int64_t r = 0; r < group.count; ++r) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(row_address(a.q, map, row + r));
    for (int64_t d = 0; d < a.cache.k_dim; d += 2) {
      uint16_t* pair = pairs + d * group.count + 2 * r;
      pair[0] = from[d * a.q.stride_d], pair[1] = from[(d + 1) * a.q.stride_d];
    }
  }
}

// Scores of R rows over a tile that is read as it lies, before finish_scores.
template <int R, bool BF16>
inline void row_scores(const AttentionArgs& a, const SequenceView& seq, const float* q, const Tile& tile,
                       const Ahead& ahead, float* scores) {
  const int64_t words = k_words(a.cache), stride = k_word_stride(a.cache);
  (void)seq;
#if defined(__AVX512BF16__)
  if (BF16 && takes_pairs(a, seq)) {
    return pair_scores<R>(reinterpret_cast<const uint32_t*>(q), tile, ahead, words, stride, query_scale(a), scores);
  }
#endif
  tile_scores<R, BF16>(q, tile, ahead, words, stride, scores);
}

// Sets the bounds of a group's rows, which start at row `first` of their head, and zeroes their sums.
inline void open_bounds(const AttentionArgs& a, const Item& item, int64_t first, RowGroup& group) {
  for (int64_t j = 0; j < group.count; ++j) {
    const int64_t i = (first + j) / group_size(a);
    group.low[j] = first_slot(a, item.seq, i);
    group.end[j] = end_slot(item.seq, i);
  }
}

// Floats of an item's sums, its packed queries and one row to spare.
KVR_INLINE int64_t group_floats(const CacheView& c, int64_t rows) {
  constexpr int64_t pad = 16;
  return div_up((head_dim(c) + c.v_dim) * rows + head_dim(c), pad) * pad;
}

// Cuts an item's rows into groups in `memory` (group_floats), packs their queries and zeroes their sums.
inline void open_groups(const AttentionArgs& a, const Item& item, float* memory, HeadRows& to) {
  const int64_t dims = head_dim(a.cache), v_dims = a.cache.v_dim;
  float* q = memory + v_dims * item.rows;
  float* spare = q + dims * item.rows;
  const bool as_pairs = takes_pairs(a, item.seq) || takes_fp8(a, item.seq);
  to.count = 0;
  for (int64_t r = 0; r < item.rows; r += to.groups[to.count++].count) {
    RowGroup& group = to.groups[to.count];
    group.count = group_rows(item.rows - r);
    group.q = q + r * dims;
    group.acc = memory + r * v_dims;
    load_rows(a, row_map(item.seq, item.head, group_size(a)), item.row + r, as_pairs, group, spare);
    reset(group, v_dims);
    open_bounds(a, item, item.row + r, group);
  }
}

}  // namespace kvreclaim::KVR_NS
