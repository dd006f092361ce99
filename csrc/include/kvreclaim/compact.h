// Slides the kept tokens of one sequence together, in place, in all layers.
//
// Token kept[i] of the old table goes to slot i of the new one. Since kept ascends, kept[i] >= i: a target
// written in ascending order never lies before the sources still to be read, wherever the two tables name
// the same blocks in the same places. Where they do not, a head's result is gathered in scratch first.
//
// Keys: move.h. Values of plain formats are rows of bytes, those of coded ones fields of words (move_coded.h).
// Oracle: ops/reference/rows.py::compact.
#pragma once

#include "kvreclaim/move.h"

#ifdef KVR_NS
#include "kvreclaim/move_coded.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS {

// memmove for a target before its source; bytes is a multiple of 16.
KVR_INLINE void slide(char* to, const char* from, int64_t bytes) {
  int64_t i = 0;
  for (; i + 4 * (int64_t)sizeof(vu) <= bytes; i += 4 * sizeof(vu)) {
    vu x[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) x[j] = load<vu>(from + i + j * (int)sizeof(vu));
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) store(to + i + j * (int)sizeof(vu), x[j]);
  }
  for (; i < bytes; i += 16) store(to + i, load<Vec<4>::U>(from + i));
}

constexpr int64_t kRowsAhead = 8;  // rows of values fetched ahead of a run

KVR_INLINE const char* value_row(const HeadMove& h, int64_t slot) {
  const CacheView& cache = h.args.cache;
  const int64_t size = cache.block_size;
  const char* block = v_block(cache, h.layer, h.args.source_ids[slot / size], h.head);
  return block + slot % size * (cache.v_dim * size_of(cache.formats.v));
}

inline void move_values(const HeadMove& h) {
  const CacheView& cache = h.args.cache;
  const int64_t size = cache.block_size, row = cache.v_dim * size_of(cache.formats.v);
  for (int64_t begin = 0; begin < h.args.count; begin += size) {
    const int64_t end = begin + size < h.args.count ? begin + size : h.args.count;
    if (h.stays(begin, end)) continue;
    const int64_t k = begin / size;
    char* block = h.scratch == nullptr ? v_block(cache, h.layer, h.args.target_ids[k], h.head)
                                       : h.scratch + k * scratch_bytes(cache);
    for (int64_t i = begin; i < end;) {
      const int64_t from = h.kept[i], room = size - from % size;
      int64_t run = 1;
      while (i + run < end && run < room && h.kept[i + run] == from + run) ++run;
      const char* source = value_row(h, from);
      if (i + kRowsAhead < h.args.count) {
        const char* ahead = value_row(h, h.kept[i + kRowsAhead]);
        for (int64_t at = 0; at < row; at += 64) prefetch(ahead + at);
      }
      slide(block + (i - begin) * row, source, run * row);
      i += run;
    }
  }
}

// From scratch to the targets; rows past M hold nothing and stay behind.
inline void spill(const HeadMove& h, bool keys) {
  const CacheView& cache = h.args.cache;
  const int64_t size = cache.block_size;
  for (int64_t k = 0; k * size < h.args.count; ++k) {
    const int64_t left = h.args.count - k * size, slots = left < size ? left : size;
    char* to = keys ? k_block(cache, h.layer, h.args.target_ids[k], h.head)
                    : v_block(cache, h.layer, h.args.target_ids[k], h.head);
    const char* from = h.scratch + k * scratch_bytes(cache);
    if (!keys) {
      std::memcpy(to, from, slots * cache.v_dim * size_of(cache.formats.v));
    } else {
      for (int64_t w = 0; w < k_words(cache); ++w)
        std::memcpy(to + w * k_word_stride(cache), from + w * k_word_stride(cache), 4 * slots);
    }
  }
}

// Whether a target written in ascending order destroys nothing that a later one needs: the old table holds
// it at the same place, at an earlier one, or not at all.
inline bool in_place(const CompactArgs& a) {
  const int64_t size = a.cache.block_size, targets = ceil_div(a.count, size);
  for (int64_t k = 0; k < targets; ++k) {
    if (k < a.sources && a.target_ids[k] == a.source_ids[k]) continue;
    for (int64_t p = k + 1; p < a.sources; ++p)
      if (a.source_ids[p] == a.target_ids[k]) return false;
  }
  return true;
}

inline void move_head(const HeadMove& h) {
  move_keys(h);
  if (!is_plain(h.args.cache.formats)) return move_coded(h);
  if (h.scratch != nullptr) spill(h, true);
  move_values(h);
  if (h.scratch != nullptr) spill(h, false);
}

inline void compact(const CompactArgs& a) {
  const CacheView& cache = a.cache;
  if (a.count == 0) return;
  const int64_t rows = a.kept_layers * a.kept_heads, pairs = cache.layers * cache.heads;
  const int64_t sharing = pairs / rows;  // (layer, head) pairs of one row of kept slots
  const int64_t wanted = ceil_div(8 * (int64_t)max_threads(), rows);
  const int64_t parts = wanted < sharing ? wanted : sharing;
  const int64_t vectors = ceil_div(a.count, kLanes), targets = ceil_div(a.count, cache.block_size);
  const int64_t entries = MovePlan::most_entries(vectors, a.sources * cache.block_size / kLanes);
  const int64_t spare = in_place(a) ? 0 : ceil_div(targets * scratch_bytes(cache), 64) * 16;

  parallel_for(rows * parts, [&](int64_t item) {
    const int64_t row = item / parts, part = item % parts;
    float* scratch = thread_scratch(spare + entries * (kLanes + 1) + vectors + 1);
    MovePlan plan;
    plan.vectors = vectors;
    plan.index = reinterpret_cast<int32_t*>(scratch + spare);
    plan.source = plan.index + entries * kLanes;
    plan.first = plan.source + entries;
    const int64_t* kept = a.kept + row * a.count;
    plan_moves(kept, a.count, plan);
    for (int64_t i = part * sharing / parts; i < (part + 1) * sharing / parts; ++i) {
      // The i-th pair that reads this row.
      const int64_t heads = a.kept_heads == 1 ? cache.heads : 1;
      const int64_t head = a.kept_heads == 1 ? i % heads : row % a.kept_heads;
      const int64_t layer = a.kept_layers == 1 ? i / heads : row / a.kept_heads;
      const HeadMove move{a, kept, plan, layer, head, spare > 0 ? reinterpret_cast<char*>(scratch) : nullptr};
      move_head(move);
    }
  });
}

}  // namespace kvreclaim::KVR_NS
#endif
