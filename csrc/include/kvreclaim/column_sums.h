// The attention that each slot receives from a step's queries: column sums of the softmax that
// paged_attention weighs the values with.
//
// A work item is (sequence, KV head), so that every column has one writer; its query rows go through in
// groups of at most kMaxR, in order. A group's scores over all slots that it sees lie in scratch
// (kMaxR * slots floats); when the last tile is there, its rows' maxima and sums are known, and the
// probabilities are added. A second pass over the keys: paged_attention leaves no scores behind.
#pragma once

#include "kvreclaim/attention.h"

namespace kvreclaim {

struct ColumnSumsArgs {
  AttentionArgs attention;  // its `out` is not used
  float* sums;              // [N, K, columns], overwritten; zero beyond a sequence's slots
  int64_t columns;          // >= every seq_len
};

}  // namespace kvreclaim

#ifdef KVR_NS

namespace kvreclaim::KVR_NS {

// What a group of rows writes its probabilities to: column `first` on, up to item.high.
struct ColumnRows {
  int64_t first;  // multiple of kTile
  float* scores;  // [tiles][R][kTile]
  float* sums;    // of the item's sequence and head
};

// Scores of R rows over all tiles, masked, in log2 units; top[r] is the greatest of each lane.
template <int R, bool BF16>
inline void all_scores(const AttentionArgs& a, const Item& item, const RowGroup& group, const ColumnRows& to,
                       vf* top) {
  Tile tile, next;
  TileMask mask;
  float* s = to.scores;
  open_tile(a, item, to.first, tile);
  for (int64_t at = to.first; at < item.high; at += kTile, tile = next) {
    open_mask(a, item, at, mask);
    open_tile(a, item, smaller(at + kTile, item.high - 1), next);
    for (int c = 0; c < kChunks; ++c) tile.v[c] = next.k[c];  // tile_scores fetches these meanwhile
    tile_scores<R, BF16>(group.q, tile, k_words(a.cache), k_word_stride(a.cache), s);
    for (int r = 0; r < R; ++r, s += kTile) {
      if (a.softcap != 0) softcap_row(s, a.softcap * kLog2e);
      const int64_t low = group.low[r] - at, end = group.end[r] - at;
      if (end < kTile || low > 0 || mask.has_evicted || mask.has_positions) {
        const int64_t first_position = group.end[r] + item.seq.shift - a.window;
        mask_row(s, {(int32_t)larger(low, 0), (int32_t)larger(end, 0), (int32_t)first_position}, mask);
      }
      for (int t = 0; t < kTile; t += kLanes) top[r] = vmax(top[r], load<vf>(s + t));
    }
  }
}

// Scores of one row -> weights 2^(s - m), in place; returns the factor that makes them probabilities.
template <int R>
inline float row_weights(const AttentionArgs& a, int64_t query_head, float m, float* s, int64_t tiles) {
  const float base = m == kNegInf ? 0.0f : m;
  vf sum{};
  for (int64_t tile = 0; tile < tiles; ++tile, s += R * kTile)
#pragma GCC unroll 16
    for (int t = 0; t < kTile; t += kLanes) {
      const vf p = exp2v(load<vf>(s + t) - base);
      store(s + t, p);
      sum += p;
    }
  const float weight = hsum(sum);
  if (a.sinks == nullptr) return weight == 0.0f ? 0.0f : 1.0f / weight;
  const float sink = a.sinks[query_head] * kLog2e;
  const float most = m > sink ? m : sink;
  const float factor = exp2_scalar(m - most);
  return factor / (weight * factor + exp2_scalar(sink - most));
}

template <int R>
inline void add_columns(const ColumnRows& to, const float* factors, int64_t high) {
  const float* s = to.scores;
  for (int64_t at = to.first; at < high; at += kTile, s += R * kTile) {
    const int64_t tokens = smaller(kTile, high - at);
    for (int64_t t = 0; t < tokens; t += kLanes) {
      vf sum{};
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum += load<vf>(s + r * kTile + t) * factors[r];
      float* column = to.sums + at + t;
      if (t + kLanes <= tokens) {
        store(column, load<vf>(column) + sum);
      } else {
        for (int64_t i = 0; i < tokens - t; ++i) column[i] += sum[i];
      }
    }
  }
}

template <int R, bool BF16>
inline void sum_group(const AttentionArgs& a, const Item& item, RowGroup& group, const ColumnRows& to) {
  vf top[R];
  for (int r = 0; r < R; ++r) top[r] = splat(kNegInf);
  all_scores<R, BF16>(a, item, group, to, top);
  float factors[R];
  const int64_t tiles = div_up(item.high - to.first, kTile), members = group_size(a);
  for (int r = 0; r < R; ++r) {
    const int64_t head = item.head * members + (item.row + r) % members;
    factors[r] = row_weights<R>(a, head, hmax(top[r]), to.scores + r * kTile, tiles);
  }
  add_columns<R>(to, factors, item.high);
}

template <bool BF16>
inline void sum_rows(const AttentionArgs& a, const Item& item, RowGroup& group, const ColumnRows& to) {
  switch (group.count) {
    case 1: return sum_group<1, BF16>(a, item, group, to);
    case 2: return sum_group<2, BF16>(a, item, group, to);
    case 3: return sum_group<3, BF16>(a, item, group, to);
    case 4: return sum_group<4, BF16>(a, item, group, to);
    default: return sum_group<kMaxR, BF16>(a, item, group, to);
  }
}

// All queries of one KV head of a sequence.
inline void sum_head(const AttentionArgs& a, const SequenceView& seq, int64_t head, float* sums) {
  const int64_t members = group_size(a), rows = seq.query_len * members, dims = a.cache.k_dim;
  const float scale = a.softcap != 0 ? a.scale / a.softcap : a.scale * kLog2e;
  float* scores = thread_scratch(kMaxR * (div_up(seq.seq_len, kTile) * kTile + dims));
  for (int64_t row = 0; row < rows;) {
    RowGroup group;
    group.count = group_rows(rows - row);
    group.q = scores + kMaxR * div_up(seq.seq_len, kTile) * kTile;
    load_queries(a.q, dims, row_map(seq, head, members), row, scale, group);
    for (int64_t j = 0; j < group.count; ++j) {
      const int64_t i = (row + j) / members;
      group.low[j] = first_slot(a, seq, i);
      group.end[j] = end_slot(seq, i);
    }
    const Item item{seq, head, row, group.count, 0, group.end[group.count - 1]};
    const ColumnRows to{group.low[0] / kTile * kTile, scores, sums};
    if (a.cache.format == Format::kBF16)
      sum_rows<true>(a, item, group, to);
    else
      sum_rows<false>(a, item, group, to);
    row += group.count;
  }
}

inline void column_sums(const ColumnSumsArgs& args) {
  const AttentionArgs& a = args.attention;
  parallel_for(a.num_sequences * a.cache.heads, [&](int64_t i) {
    float* sums = args.sums + i * args.columns;
    std::memset(sums, 0, args.columns * sizeof(float));
    sum_head(a, a.sequences[i / a.cache.heads], i % a.cache.heads, sums);
  });
}

}  // namespace kvreclaim::KVR_NS
#endif
