// The attention that each slot receives from a step's queries: column sums of the softmax that
// paged_attention weighs the values with.
//
// A work item is (sequence, KV head), so that every column has one writer; its query rows go through in
// groups of at most kMaxR, in order. A group's scores over all slots that it sees lie in scratch
// (kMaxR * slots floats); when the last tile is there, its rows' maxima and sums are known, and the
// probabilities are added. A second pass over the keys: paged_attention leaves no scores behind.
#pragma once

#include "kvreclaim/attention_args.h"

#ifdef KVR_NS
#include "kvreclaim/attend_item.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS {

// What a group of rows writes its probabilities to: column `first` on, up to item.high.
struct ColumnRows {
  int64_t first;  // multiple of kTile
  float* scores;  // [tiles][R][kTile]
  float* sums;    // of the item's sequence and head
  float* panels;  // a tile's keys, where they are not read as they lie
};

// Masked scores of R rows over the tile at slot `at`; top[r] is the greatest of each lane so far.
template <int R>
inline void finish_tile(const AttentionArgs& a, const Item& item, const RowGroup& group, int64_t at, float* s,
                        vf* top) {
  TileMask mask;
  open_mask(a, item, at, mask);
  finish_scores<R>(a, item, group, at, mask, s);
  for (int r = 0; r < R; ++r, s += kTile)
    for (int t = 0; t < kTile; t += kLanes) top[r] = vmax(top[r], load<vf>(s + t));
}

// Scores of R rows over all tiles, masked, in log2 units.
template <int R, bool BF16>
inline void direct_scores(const AttentionArgs& a, const Item& item, const RowGroup& group, const ColumnRows& to,
                          vf* top) {
  Tile tile, next;
  float* s = to.scores;
  open_tile(a, item, to.first, tile);
  for (int64_t at = to.first; at < item.high; at += kTile, tile = next, s += R * kTile) {
    open_tile(a, item, smaller(at + kTile, item.high - 1), next);
    row_scores<R, BF16>(a, item.seq, group.q, tile, {next, 0, kTile}, s);
    finish_tile<R>(a, item, group, at, s, top);
  }
}

template <int R>
inline void all_scores(const AttentionArgs& a, const Item& item, const RowGroup& group, const ColumnRows& to,
                       vf* top) {
  if (reads_direct(a.cache))
    return a.cache.formats.k == Format::kBF16 ? direct_scores<R, true>(a, item, group, to, top)
                                           : direct_scores<R, false>(a, item, group, to, top);
  float* s = to.scores;
  const Panels panels = panels_in(a.cache, to.panels);
  for (int64_t at = to.first; at < item.high; at += kTile, s += R * kTile) {
    fill_panels(a, item, at, false, panels);
    panel_scores<R>(a, panels, group.q, s);
    finish_tile<R>(a, item, group, at, s, top);
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

template <int R>
inline void sum_group(const AttentionArgs& a, const Item& item, RowGroup& group, const ColumnRows& to) {
  vf top[R];
  for (int r = 0; r < R; ++r) top[r] = splat(kNegInf);
  all_scores<R>(a, item, group, to, top);
  float factors[R];
  const int64_t tiles = div_up(item.high - to.first, kTile), members = group_size(a);
  for (int r = 0; r < R; ++r) {
    const int64_t head = item.head * members + (item.row + r) % members;
    factors[r] = row_weights<R>(a, head, hmax(top[r]), to.scores + r * kTile, tiles);
  }
  add_columns<R>(to, factors, item.high);
}

inline void sum_rows(const AttentionArgs& a, const Item& item, RowGroup& group, const ColumnRows& to) {
  switch (group.count) {
    case 1: return sum_group<1>(a, item, group, to);
    case 2: return sum_group<2>(a, item, group, to);
    case 3: return sum_group<3>(a, item, group, to);
    case 4: return sum_group<4>(a, item, group, to);
    default: return sum_group<kMaxR>(a, item, group, to);
  }
}

// All queries of one KV head of a sequence.
inline void sum_head(const AttentionArgs& a, const SequenceView& seq, int64_t head, float* sums) {
  const int64_t members = group_size(a), rows = seq.query_len * members, dims = head_dim(a.cache);
  const int64_t slots = div_up(seq.seq_len, kTile) * kTile;
  float* scores = thread_scratch(kMaxR * (slots + dims) + (kTile + 1) * dims);
  float* q = scores + kMaxR * slots;
  for (int64_t row = 0; row < rows;) {
    RowGroup group;
    group.count = group_rows(rows - row);
    group.q = q;
    float* spare = q + kMaxR * dims;
    load_rows(a, row_map(seq, head, members), row, takes_pairs(a, seq), group, spare);
    const Item item{seq, head, row, group.count, 0, end_slot(seq, (row + group.count - 1) / members)};
    open_bounds(a, item, row, group);
    sum_rows(a, item, group, {group.low[0] / kTile * kTile, scores, sums, spare + dims});
    row += group.count;
  }
}

// Defined once per instruction set, by src/attention.cpp.
void column_sums(const ColumnSumsArgs& args) {
  const AttentionArgs& a = args.attention;
  parallel_for(a.num_sequences * a.cache.heads, [&](int64_t i) {
    float* sums = args.sums + i * args.columns;
    std::memset(sums, 0, args.columns * sizeof(float));
    sum_head(a, a.sequences[i / a.cache.heads], i % a.cache.heads, sums);
  });
}

}  // namespace kvreclaim::KVR_NS
#endif
