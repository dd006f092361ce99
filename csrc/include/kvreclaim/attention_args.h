// What attention and what reads a step's queries like it takes: plain data.
#pragma once

#include "kvreclaim/layout.h"

namespace kvreclaim {

// Logical positions of the slots of a sequence, [L, K, slots], contiguous in slots; data null: slot + shift.
struct SlotPositions {
  const int32_t* data;
  int64_t stride_layer, stride_head, slots;
};

// More queries than these of a sequence are a prefill. A row of fewer is the same, to the bit, as if it were its
// sequence's only one in the call: rows that are drafts of a decode step.
constexpr int64_t kExactQueries = 33;

struct SequenceView {
  const int32_t* block_ids;
  int64_t first_row;  // of the queries, in the flat token dim
  int64_t query_len, seq_len, shift;
  SlotPositions positions;
  int64_t index = 0;  // in its batch; the kernel sets it in its own copies
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
  const float* sinks;  // of head h of sequence i: sinks[(i * num_heads + h) % num_sinks]; or null
  int64_t num_sinks;   // a multiple of num_heads
};

struct ColumnSumsArgs {
  AttentionArgs attention;  // its `out` is not used
  float* sums;              // [N, K, columns], overwritten; zero beyond a sequence's slots
  int64_t columns;          // >= every seq_len
};

}  // namespace kvreclaim
