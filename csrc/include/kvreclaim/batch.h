// The sequences of a step out of arrays: what a batch over cells has instead of one object per sequence.
#pragma once

#include <vector>

#include "kvreclaim/attention_args.h"

namespace kvreclaim {

struct BatchArrays {
  const int32_t* block_table;   // [N, W]; entries past a sequence's last block may be anything
  const int32_t* query_starts;  // [N + 1] first row of each sequence in the flat token dim
  const int32_t *seq_lens, *shifts;  // [N]
  int64_t num_sequences, width;
};

// Appends N views that point into the block table. Returns what is wrong with the arrays, in which case nothing was
// appended, or null. max_block becomes the highest block that a sequence names, if it was lower.
inline const char* append_sequences(const BatchArrays& a, int64_t block_size, std::vector<SequenceView>& sequences,
                                    int64_t& max_block) {
  int64_t highest = max_block;
  if (a.query_starts[0] != 0) return "query_starts does not begin with 0";
  for (int64_t i = 0; i < a.num_sequences; ++i) {
    const int64_t query_len = (int64_t)a.query_starts[i + 1] - a.query_starts[i], seq_len = a.seq_lens[i];
    if (query_len < 0) return "query_starts descends";
    if (query_len > seq_len) return "query_starts has more rows for a sequence than seq_lens has tokens";
    if (seq_len > a.width * block_size) return "block_table has too few blocks for seq_lens";
    const int32_t* ids = a.block_table + i * a.width;
    for (int64_t b = 0; b * block_size < seq_len; ++b) {
      if (ids[b] < 0) return "block_table has a negative block";
      if (ids[b] > highest) highest = ids[b];
    }
  }
  sequences.reserve(sequences.size() + (size_t)a.num_sequences);
  for (int64_t i = 0; i < a.num_sequences; ++i)
    sequences.push_back({a.block_table + i * a.width, a.query_starts[i], a.query_starts[i + 1] - a.query_starts[i],
                         a.seq_lens[i], a.shifts[i], {}});
  max_block = highest;
  return nullptr;
}

}  // namespace kvreclaim
