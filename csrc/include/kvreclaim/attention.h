// Paged attention: decode and chunked prefill by one kernel, in tiles with an online softmax.
//
// A work item is (sequence, KV head, block of query rows, part of the keys). Keys are cut at multiples of a
// number of slots that the sequence alone decides, so that a row's result depends neither on the batch nor on
// the threads; the parts' sums are merged at the end. Prefill has rows enough to keep threads busy and is not cut.
// Source of the merge: online softmax, arXiv 1805.02867; split keys as in Flash-Decoding.
#pragma once

#include "kvreclaim/attention_args.h"

#ifdef KVR_NS
#include <cstdlib>
#include <cstring>

#include "kvreclaim/attend_item.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS {

constexpr int64_t kSplit = 512;  // slots of one part of a decode row's keys

// The same over integer products, where a part costs as much before its first token as 50 tokens, and by matrices,
// where nothing is fetched ahead of its first tile: longer parts where there are many.
KVR_INLINE int64_t long_split(int64_t slots) { return slots > 8192 ? 2048 : slots > 2048 ? 1024 : kSplit; }

// How a sequence is cut into items.
struct Plan {
  int64_t first_item, row_block, row_blocks, split, splits, first_slot;  // first_slot: multiple of split
  int64_t run;       // KV heads of an item
  int64_t partials;  // first row of its partial sums; rows of Dv + 2 floats

  bool is_cut() const { return row_blocks == 1 && splits > 1; }
};

inline Plan plan_sequence(const AttentionArgs& a, const SequenceView& seq) {
  Plan plan{};
  plan.run = item_heads(a, seq);
  const int64_t rows = seq.query_len * group_size(a);
  plan.row_block = seq.query_len == 1 && !reads_direct(a.cache) ? kMaxRows : kRowBlock;
  plan.row_blocks = div_up(rows, plan.row_block);
  plan.splits = plan.row_blocks;
  plan.split = takes_long_parts(a, seq) ? long_split(seq.seq_len) : kSplit;
  if (plan.row_blocks == 1) {
    plan.first_slot = first_slot(a, seq, 0) / plan.split * plan.split;
    plan.splits = div_up(seq.seq_len - plan.first_slot, plan.split);
  }
  return plan;
}

// Item `index` of a sequence, the first of its heads: heads innermost (their blocks are neighbours), longest rows first.
KVR_INLINE Item item_of(const AttentionArgs& a, const SequenceView& seq, const Plan& plan, int64_t index) {
  const int64_t runs = a.cache.heads / plan.run, head = index % runs * plan.run, part = index / runs;
  const int64_t all_rows = seq.query_len * group_size(a);
  if (plan.row_blocks == 1) {
    const int64_t low = plan.first_slot + part * plan.split;
    return {seq, head, 0, all_rows, low, smaller(low + plan.split, seq.seq_len)};
  }
  const int64_t row = (plan.row_blocks - 1 - part) * plan.row_block;
  const int64_t rows = smaller(plan.row_block, all_rows - row);
  return {seq, head, row, rows, 0, end_slot(seq, (row + rows - 1) / group_size(a))};
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

// out[t, h] for every row of every sequence; rows that belong to no sequence become zero. Defined once per
// instruction set, by src/attention.cpp.
void paged_attention(const AttentionArgs& a) {
  const int64_t n = a.num_sequences, heads = a.cache.heads;
  Plan* plans = static_cast<Plan*>(std::malloc(sizeof(Plan) * (n + 1)));
  int64_t items = 0, partial_rows = 0, rows = 0;
  for (int64_t i = 0; i < n; ++i) {
    const SequenceView& seq = a.sequences[i];
    plans[i] = plan_sequence(a, seq);
    plans[i].first_item = items;
    plans[i].partials = partial_rows;
    items += plans[i].splits * heads / plans[i].run;
    if (plans[i].is_cut()) partial_rows += plans[i].splits * heads * seq.query_len * group_size(a);
    rows += seq.query_len;
  }
  plans[n].first_item = items;
  float* partials = call_scratch(partial_rows * (a.cache.v_dim + 2));
  parallel_for(items, [&](int64_t index) {
    int64_t low = 0, high = n;  // plans[low].first_item <= index < plans[high].first_item
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (plans[middle].first_item <= index ? low : high) = middle;
    }
    const Plan& plan = plans[low];
    const Item item = item_of(a, a.sequences[low], plan, index - plan.first_item);
    const int64_t own = (plan.partials + (index - plan.first_item) * plan.run * item.rows) * (a.cache.v_dim + 2);
    run_item(a, item, plan.run, plan.row_blocks == 1, plan.is_cut() ? partials + own : nullptr);
  });
  if (partial_rows > 0)
    parallel_for(n * heads, [&](int64_t i) {
      const Plan& plan = plans[i / heads];
      if (plan.is_cut()) merge_head(a, a.sequences[i / heads], plan, i % heads, partials);
    });
  for (int64_t t = rows; t < a.num_rows; ++t) zero_row(a.out, t, a.num_heads, a.cache.v_dim);
  std::free(plans);
}

}  // namespace kvreclaim::KVR_NS
#endif
