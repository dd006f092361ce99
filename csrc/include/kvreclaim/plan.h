// How attention is cut into work items: (sequence, KV heads, block of query rows, part of the keys).
//
// Keys of few rows are cut at multiples of a number of slots that a row's own length decides, so that a row is the same
// whatever is beside it: other sequences, other rows of its own, threads. Prefill has rows enough to keep threads busy
// and is not cut.
#pragma once

#include <cstdlib>

#include "kvreclaim/attend_item.h"

namespace kvreclaim::KVR_NS {

constexpr int64_t kSplit = 512;  // slots of one part of a decode row's keys

// The same over integer products, where a part costs as much before its first token as 50 tokens, and by matrices,
// where nothing is fetched ahead of its first tile: longer parts where there are many.
constexpr int64_t kManySlots = 2048, kMostSlots = 8192;
KVR_INLINE int64_t long_split(int64_t slots) { return slots > kMostSlots ? 2048 : slots > kManySlots ? 1024 : kSplit; }

// Queries of a sequence that are cut alike, as a sequence of their own, and how they are cut into items.
struct Plan {
  SequenceView seq;
  int64_t first_item, rows, row_block, row_blocks, split, parts, first_slot;  // first_slot: multiple of split
  int64_t run;       // KV heads of an item
  int64_t partials;  // first row of its partial sums; rows of Dv + 2 floats
  bool is_decode;    // keys are cut where a row's length says

  bool is_cut() const { return parts > 1; }
};

inline Plan plan_sequence(const AttentionArgs& a, const SequenceView& seq) {
  Plan plan{};
  plan.seq = seq;
  plan.run = item_heads(a, seq);
  plan.rows = seq.query_len * group_size(a);
  const bool is_few = seq.query_len <= kExactQueries;
  const int64_t most = is_few && !reads_direct(a.cache) ? kMaxRows : kRowBlock;  // of a decode item with one query
  plan.is_decode = deciding_rows(a, seq) <= most;
  plan.row_block = is_few && plan.is_decode ? kMaxRows : most;
  plan.row_blocks = div_up(plan.rows, plan.row_block);
  plan.parts = 1;
  plan.split = takes_long_parts(a, seq) ? long_split(seq.seq_len) : kSplit;
  if (plan.is_decode) {
    plan.first_slot = first_slot(a, seq, 0) / plan.split * plan.split;
    plan.parts = div_up(seq.seq_len - plan.first_slot, plan.split);
  }
  return plan;
}

// One past the last query from `first` on that, alone, would be cut and taken as that one is.
inline int64_t end_of_alike(const AttentionArgs& a, const SequenceView& seq, int64_t first) {
  if (seq.query_len > kExactQueries) return seq.query_len;
  const int64_t slots = end_slot(seq, first);
  int64_t last = seq.seq_len;
  if (takes_long_parts(a, seq) && slots <= kMostSlots)
    last = smaller(last, slots <= kManySlots ? kManySlots : kMostSlots);
  return first + last - slots + 1;
}

// Queries [first, end) of a sequence.
inline SequenceView part_of(const SequenceView& seq, int64_t first, int64_t end) {
  SequenceView part = seq;
  part.first_row += first;
  part.query_len = end - first;
  part.seq_len = end_slot(seq, end - 1);
  return part;
}

// Plans of a batch, and one more that ends their items. The caller frees `plans`.
struct Plans {
  Plan* plans;
  int64_t count, items, partial_rows, query_rows;
};

template <class Body>
inline void for_each_part(const AttentionArgs& a, const Body& body) {
  for (int64_t i = 0; i < a.num_sequences; ++i) {
    const SequenceView& seq = a.sequences[i];
    for (int64_t first = 0, end = 0; first < seq.query_len; first = end) {
      end = end_of_alike(a, seq, first);
      SequenceView part = part_of(seq, first, end);
      part.index = i;
      body(part);
    }
  }
}

inline Plans plan_batch(const AttentionArgs& a) {
  Plans all{};
  for_each_part(a, [&](const SequenceView&) { ++all.count; });
  all.plans = static_cast<Plan*>(std::malloc(sizeof(Plan) * (all.count + 1)));
  Plan* next = all.plans;
  for_each_part(a, [&](const SequenceView& seq) {
    Plan& plan = *next++ = plan_sequence(a, seq);
    plan.first_item = all.items;
    plan.partials = all.partial_rows;
    all.items += plan.row_blocks * plan.parts * a.cache.heads / plan.run;
    if (plan.is_cut()) all.partial_rows += plan.parts * a.cache.heads * plan.rows;
    all.query_rows += seq.query_len;
  });
  next->first_item = all.items;
  return all;
}

// Where item `index` of a plan is; of all heads, blocks of rows and parts.
struct Place {
  int64_t head, row_block, part;
};

// Heads innermost (their blocks are neighbours), then rows (of the same keys), longest first.
KVR_INLINE Place place_of(const AttentionArgs& a, const Plan& plan, int64_t index) {
  const int64_t runs = a.cache.heads / plan.run, rest = index / runs;
  return {index % runs * plan.run, plan.row_blocks - 1 - rest % plan.row_blocks, rest / plan.row_blocks};
}

KVR_INLINE Item item_of(const AttentionArgs& a, const Plan& plan, const Place& place) {
  const int64_t row = place.row_block * plan.row_block, rows = smaller(plan.row_block, plan.rows - row);
  const int64_t end = end_slot(plan.seq, (row + rows - 1) / group_size(a));
  if (!plan.is_decode) return {plan.seq, place.head, row, rows, 0, end};
  const int64_t low = plan.first_slot + place.part * plan.split;
  return {plan.seq, place.head, row, rows, low, smaller(low + plan.split, end)};
}

}  // namespace kvreclaim::KVR_NS
