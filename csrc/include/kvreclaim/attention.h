// Paged attention: decode and chunked prefill by one kernel, in tiles with an online softmax.
//
// A work item is (sequence, KV head, block of query rows, part of the keys). Keys are cut at multiples of
// kSplit slots, a fixed number, so that a row's result depends neither on the batch nor on the threads;
// the parts' sums are merged at the end. Prefill has rows enough to keep threads busy and is not cut.
// Source of the merge: online softmax, arXiv 1805.02867; split keys as in Flash-Decoding.
#pragma once

#include "kvreclaim/layout.h"

namespace kvreclaim {

// A [L, K, slots] tensor of a sequence, contiguous in its slots; data null: there is none.
template <class E>
struct SlotTable {
  const E* data;
  int64_t stride_layer, stride_head, slots;
};

struct SequenceView {
  const int32_t* block_ids;
  int64_t first_row;  // of the queries, in the flat token dim
  int64_t query_len, seq_len, shift;
  SlotTable<uint8_t> evicted;
  SlotTable<int32_t> positions;
};

struct AttentionArgs {
  CacheView cache;
  int64_t layer;
  RowsView q, out;  // [T, H, D] with any strides, [T, H, Dv] with contiguous rows
  int64_t num_rows, num_heads;
  const SequenceView* sequences;
  int64_t num_sequences;
  float scale;
  float softcap;       // 0: none
  int64_t window;      // 0: none
  const float* sinks;  // [H] or null
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include <cstdlib>
#include <cstring>

#include "kvreclaim/memory.h"
#include "kvreclaim/rows.h"
#include "kvreclaim/threads.h"
#include "kvreclaim/tile.h"

namespace kvreclaim::KVR_NS {

constexpr int64_t kSplit = 512;    // slots of one part of a decode row's keys
constexpr int64_t kRowBlock = 64;  // query rows of one item

KVR_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
KVR_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
KVR_INLINE int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How a sequence is cut into items.
struct Plan {
  int64_t first_item, row_blocks, splits, first_slot;  // first_slot: multiple of kSplit
  int64_t partials;                                    // first row of its partial sums; rows of Dv + 2 floats
};

// One item: rows [row, row + rows) of a KV head over slots [low, high).
struct Item {
  const SequenceView& seq;
  int64_t head, row, rows, low, high;
};

KVR_INLINE int64_t group_size(const AttentionArgs& a) { return a.num_heads / a.cache.heads; }

// First slot that query `i` can see, and one past the last.
KVR_INLINE int64_t first_slot(const AttentionArgs& a, const SequenceView& seq, int64_t i) {
  if (a.window == 0 || seq.positions.data != nullptr) return 0;
  return larger(0, seq.seq_len - seq.query_len + i - a.window + 1);
}
KVR_INLINE int64_t end_slot(const SequenceView& seq, int64_t i) { return seq.seq_len - seq.query_len + i + 1; }

inline Plan plan_sequence(const AttentionArgs& a, const SequenceView& seq) {
  Plan plan{};
  const int64_t rows = seq.query_len * group_size(a);
  plan.row_blocks = div_up(rows, kRowBlock);
  plan.splits = plan.row_blocks;
  if (plan.row_blocks == 1) {
    plan.first_slot = first_slot(a, seq, 0) / kSplit * kSplit;
    plan.splits = div_up(seq.seq_len - plan.first_slot, kSplit);
  }
  return plan;
}

// Fills the tile's addresses and mask for slots [at, at + kTile) of an item.
inline void open_tile(const AttentionArgs& a, const Item& item, int64_t at, Tile& tile) {
  const int64_t size = a.cache.block_size;
  for (int c = 0; c < kChunks; ++c) {
    const int64_t slot = smaller(at + c * kChunk, (item.high - 1) / kChunk * kChunk);
    const int64_t block = item.seq.block_ids[slot / size], offset = slot % size;
    tile.k[c] = k_block(a.cache, a.layer, block, item.head) + offset * 4;
    tile.v[c] = v_block(a.cache, a.layer, block, item.head) + offset * a.cache.v_dim * size_of(a.cache.format);
  }
}

inline void open_mask(const AttentionArgs& a, const Item& item, int64_t at, TileMask& mask) {
  const SlotTable<uint8_t>& evicted = item.seq.evicted;
  mask.has_evicted = evicted.data != nullptr && at < evicted.slots;
  if (mask.has_evicted) {
    const uint8_t* dead = evicted.data + a.layer * evicted.stride_layer + item.head * evicted.stride_head;
    for (int64_t t = 0; t < kTile; ++t) mask.live[t] = at + t < evicted.slots && dead[at + t] ? 0 : -1;
  }
  const SlotTable<int32_t>& known = item.seq.positions;
  mask.has_positions = a.window != 0 && known.data != nullptr;
  if (mask.has_positions) {
    const int32_t* table = known.data + a.layer * known.stride_layer + item.head * known.stride_head;
    for (int64_t t = 0; t < kTile; ++t)
      mask.positions[t] = at + t < known.slots ? table[at + t] : (int32_t)(at + t + item.seq.shift);
  }
}

// One group of R rows over the tile at slot `at`.
template <int R, bool BF16>
inline void tile_rows(const AttentionArgs& a, const Item& item, int64_t at, const Tile& tile, const Tile& next,
                      const TileMask& mask, RowGroup& group, float* scores) {
  const int64_t tokens = smaller(kTile, smaller(item.high, group.end[R - 1]) - at), stride = k_word_stride(a.cache);
  if (tokens <= 0) return;
  tile_scores<R, BF16>(group.q, tile, k_words(a.cache), stride, scores);
  for (int r = 0; r < R; ++r) {
    float* s = scores + r * kTile;
    if (a.softcap != 0) softcap_row(s, a.softcap * kLog2e);
    const int64_t low = group.low[r] - at, end = smaller(item.high, group.end[r]) - at;
    if (end < kTile || low > 0 || mask.has_evicted || mask.has_positions) {
      const int64_t first_position = group.end[r] + item.seq.shift - a.window;
      mask_row(s, {(int32_t)larger(low, 0), (int32_t)larger(end, 0), (int32_t)first_position}, mask);
    }
  }
  float alpha[kMaxR];
  softmax_rows<R>(scores, group, alpha);
  const int64_t v_dim = a.cache.v_dim, row_bytes = v_dim * size_of(a.cache.format);
  all_values<R, BF16>({tile, tokens, row_bytes / 4, row_bytes, group.acc, v_dim, scores, alpha, next.k, stride});
}

template <bool BF16>
inline void run_tiles(const AttentionArgs& a, const Item& item, RowGroup* groups, int count) {
  alignas(64) float scores[kMaxR * kTile];
  const int64_t start = larger(item.low, first_slot(a, item.seq, item.row / group_size(a))) / kTile * kTile;
  Tile tile, next;
  TileMask mask;
  open_tile(a, item, start, tile);
  for (int64_t at = start; at < item.high; at += kTile, tile = next) {
    open_mask(a, item, at, mask);
    open_tile(a, item, smaller(at + kTile, item.high - 1), next);
    for (int g = 0; g < count; ++g) {
      const Tile& ahead = g + 1 < count ? tile : next;  // the last rows fetch the next tile
      switch (groups[g].count) {
        case 1: tile_rows<1, BF16>(a, item, at, tile, ahead, mask, groups[g], scores); break;
        case 2: tile_rows<2, BF16>(a, item, at, tile, ahead, mask, groups[g], scores); break;
        case 3: tile_rows<3, BF16>(a, item, at, tile, ahead, mask, groups[g], scores); break;
        case 4: tile_rows<4, BF16>(a, item, at, tile, ahead, mask, groups[g], scores); break;
        default: tile_rows<kMaxR, BF16>(a, item, at, tile, ahead, mask, groups[g], scores);
      }
    }
  }
}

// Item `index` of a sequence: heads innermost (their blocks are neighbours), longest rows first.
KVR_INLINE Item item_of(const AttentionArgs& a, const SequenceView& seq, const Plan& plan, int64_t index) {
  const int64_t head = index % a.cache.heads, part = index / a.cache.heads;
  const int64_t all_rows = seq.query_len * group_size(a);
  if (plan.row_blocks == 1) {
    const int64_t low = plan.first_slot + part * kSplit;
    return {seq, head, 0, all_rows, low, smaller(low + kSplit, seq.seq_len)};
  }
  const int64_t row = (plan.row_blocks - 1 - part) * kRowBlock;
  const int64_t rows = smaller(kRowBlock, all_rows - row);
  return {seq, head, row, rows, 0, end_slot(seq, (row + rows - 1) / group_size(a))};
}

// Rows that go through the tiles together: as many as have a loop of their own.
KVR_INLINE int64_t group_rows(int64_t left) { return left >= kMaxR ? kMaxR : smaller(left, 4); }

// Cuts an item's rows into groups, packs their queries and zeroes their sums; returns how many groups.
inline int open_groups(const AttentionArgs& a, const Item& item, RowGroup* groups) {
  const int64_t dims = a.cache.k_dim, v_dims = a.cache.v_dim;
  const float scale = a.softcap != 0 ? a.scale / a.softcap : a.scale * kLog2e;
  float* q = thread_scratch((dims + v_dims) * item.rows);
  float* acc = q + item.rows * dims;
  int count = 0;
  for (int64_t r = 0; r < item.rows; r += groups[count++].count) {
    RowGroup& group = groups[count];
    group.count = group_rows(item.rows - r);
    group.q = q + r * dims;
    group.acc = acc + r * v_dims;
    load_queries(a.q, dims, row_map(item.seq, item.head, group_size(a)), item.row + r, scale, group);
    reset(group, v_dims);
    for (int64_t j = 0; j < group.count; ++j) {
      const int64_t i = (item.row + r + j) / group_size(a);
      group.low[j] = first_slot(a, item.seq, i);
      group.end[j] = end_slot(item.seq, i);
    }
  }
  return count;
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

inline void run_item(const AttentionArgs& a, const SequenceView& seq, const Plan& plan, int64_t index,
                     float* partials) {
  const Item item = item_of(a, seq, plan, index);
  RowGroup groups[kRowBlock / kMaxR + 2];
  const int count = open_groups(a, item, groups);
  if (a.cache.format == Format::kBF16)
    run_tiles<true>(a, item, groups, count);
  else
    run_tiles<false>(a, item, groups, count);
  const bool is_part = plan.row_blocks == 1 && plan.splits > 1;
  const int64_t own = (plan.partials + index * item.rows) * (a.cache.v_dim + 2);
  close_groups(a, item, groups, count, is_part ? partials + own : nullptr);
}

// Merges the parts of one KV head's rows into part 0 and writes them out.
inline void merge_head(const AttentionArgs& a, const SequenceView& seq, const Plan& plan, int64_t head,
                       float* partials) {
  const int64_t rows = seq.query_len * group_size(a), width = a.cache.v_dim + 2;
  for (int64_t r = 0; r < rows; ++r) {
    float* first = partials + (plan.partials + head * rows + r) * width;
    const int64_t step = a.cache.heads * rows * width;
    Sums sums{first[0], first[1], first + 2};
    for (int64_t s = 1; s < plan.splits; ++s) {
      const float* other = first + s * step;
      merge(sums, {other[0], other[1], const_cast<float*>(other + 2)}, a.cache.v_dim);
    }
    write_row(a, row_map(seq, head, group_size(a)), r, sums);
  }
}

// out[t, h] for every row of every sequence; rows that belong to no sequence become zero.
inline void paged_attention(const AttentionArgs& a) {
  const int64_t n = a.num_sequences, heads = a.cache.heads;
  Plan* plans = static_cast<Plan*>(std::malloc(sizeof(Plan) * (n + 1)));
  int64_t items = 0, partial_rows = 0, rows = 0;
  for (int64_t i = 0; i < n; ++i) {
    const SequenceView& seq = a.sequences[i];
    plans[i] = plan_sequence(a, seq);
    plans[i].first_item = items;
    plans[i].partials = partial_rows;
    items += plans[i].splits * heads;
    if (plans[i].row_blocks == 1 && plans[i].splits > 1)
      partial_rows += plans[i].splits * heads * seq.query_len * group_size(a);
    rows += seq.query_len;
  }
  plans[n].first_item = items;
  float* partials = call_scratch(partial_rows * (a.cache.v_dim + 2));
  parallel_for(items, [&](int64_t item) {
    int64_t low = 0, high = n;  // plans[low].first_item <= item < plans[high].first_item
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (plans[middle].first_item <= item ? low : high) = middle;
    }
    run_item(a, a.sequences[low], plans[low], item - plans[low].first_item, partials);
  });
  if (partial_rows > 0)
    parallel_for(n * heads, [&](int64_t i) {
      const Plan& plan = plans[i / heads];
      if (plan.row_blocks == 1 && plan.splits > 1)
        merge_head(a, a.sequences[i / heads], plan, i % heads, partials);
    });
  for (int64_t t = rows; t < a.num_rows; ++t) zero_row(a.out, t, a.num_heads, a.cache.v_dim);
  std::free(plans);
}

}  // namespace kvreclaim::KVR_NS
#endif
