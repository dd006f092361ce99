// Slides the kept tokens of one sequence together, in place, in all layers.
//
// Token kept[i] of the old table goes to slot i of the new one. Since kept ascends, kept[i] >= i: a target
// written in ascending order never lies before the sources still to be read, wherever the two tables name
// the same blocks in the same places. Where they do not, a head's result is gathered in scratch first.
//
// Keys lie with tokens along the lanes, so a target vector is put together from the few source vectors that
// hold its tokens by one two-source permutation per further source; the permutations are worked out once per
// set of kept slots and serve all word rows, and all layers and heads that share the set. Values are rows
// of bytes. Oracle: ops/reference.py::compact.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvreclaim/layout.h"

namespace kvreclaim {

struct CompactArgs {
  CacheView cache;
  const int64_t* kept;              // [kept_layers, kept_heads, count], each row strictly ascending
  int64_t kept_layers, kept_heads;  // L or 1, K or 1
  int64_t count;                    // M
  const int64_t* source_ids;        // the old table
  int64_t sources;
  const int64_t* target_ids;        // the new one: ceil(M / S) blocks, none twice
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include "kvreclaim/memory.h"
#include "kvreclaim/threads.h"
#include "kvreclaim/tokens.h"

namespace kvreclaim::KVR_NS {

// Lane i of the result is lane index[i] of a, or of b from kLanes on.
KVR_INLINE vu permute2(vu a, vu b, vi index) {
#if defined(__AVX512F__)
  return (vu)_mm512_permutex2var_epi32((__m512i)a, (__m512i)index, (__m512i)b);
#elif defined(__AVX2__)
  const vu x = (vu)_mm256_permutevar8x32_epi32((__m256i)a, (__m256i)index);
  const vu y = (vu)_mm256_permutevar8x32_epi32((__m256i)b, (__m256i)index);
  return select(index < kLanes, x, y);
#else
  uint32_t both[2 * kLanes];
  store(both, a);
  store(both + kLanes, b);
  vu out;
  for (int i = 0; i < kLanes; ++i) out[i] = both[index[i]];
  return out;
#endif
}

// How the target vectors of one row of kept slots are put together. Step j of target vector g is entry
// first[g] + j: source vector `source` (old slots source * kLanes ...) joins what there is so far.
struct MovePlan {
  int64_t vectors;  // ceil(M / kLanes)
  int32_t* first;   // [vectors + 1]
  int32_t* source;  // [entries]
  int32_t* index;   // [entries][kLanes]

  // Entries: each target vector adds one per source vector it touches, and shares at most one with the
  // next; it touches no more than its lanes.
  static int64_t most_entries(int64_t vectors, int64_t source_vectors) {
    const int64_t shared = source_vectors + vectors, lanes = vectors * kLanes;
    return shared < lanes ? shared : lanes;
  }
};

inline void plan_moves(const int64_t* kept, int64_t count, MovePlan& plan) {
  int32_t entry = 0;
  for (int64_t g = 0; g < plan.vectors; ++g) {
    plan.first[g] = entry;
    const int64_t begin = g * kLanes, lanes = count - begin < kLanes ? count - begin : kLanes;
    int64_t last = -1;
    int32_t* index = nullptr;
    for (int64_t i = 0; i < lanes; ++i) {
      const int64_t slot = kept[begin + i], source = slot / kLanes;
      if (source != last) {
        // A first and a second source share one permutation, the second's; later ones keep what there is.
        const bool second = last >= 0 && entry == plan.first[g] + 1;
        index = plan.index + (int64_t)entry * kLanes;
        if (second) {
          std::memcpy(index, index - kLanes, kLanes * sizeof(int32_t));
        } else {
          for (int j = 0; j < kLanes; ++j) index[j] = last >= 0 ? j : 0;
        }
        plan.source[entry++] = (int32_t)source;
        last = source;
      }
      const bool alone = entry == plan.first[g] + 1;
      index[i] = (int32_t)(slot % kLanes) + (alone ? 0 : kLanes);
    }
  }
  plan.first[plan.vectors] = entry;
}

// One target vector and its sources; the next one's are fetched meanwhile.
struct VectorMove {
  const char* const* from;
  const char* const* next;
  const int32_t* index;  // [sources][kLanes]
  int sources;
  char* to;
};

template <int kSources>
KVR_INLINE void move_vector(const VectorMove& m, int64_t words, int64_t stride) {
  vi index[kSources];
  const char *from[kSources], *next[kSources];
#pragma GCC unroll 4
  for (int j = 0; j < kSources; ++j) {
    index[j] = load<vi>(m.index + j * kLanes);
    from[j] = m.from[j];
    next[j] = m.next[j];
  }
  for (int64_t at = 0; at < words * stride; at += stride) {
#pragma GCC unroll 4
    for (int j = 0; j < kSources; ++j) prefetch(next[j] + at);
    vu x = load<vu>(from[0] + at);
    if constexpr (kSources == 1) x = permute2(x, x, index[0]);
#pragma GCC unroll 4
    for (int j = 1; j < kSources; ++j) x = permute2(x, load<vu>(from[j] + at), index[j]);
    store(m.to + at, x);
  }
}

inline void move_vector_of_many(const VectorMove& m, int64_t words, int64_t stride) {
  for (int64_t at = 0; at < words * stride; at += stride) {
    for (int j = 0; j < m.sources; ++j) prefetch(m.next[j] + at);
    vu x = load<vu>(m.from[0] + at);
    for (int j = 1; j < m.sources; ++j)
      x = permute2(x, load<vu>(m.from[j] + at), load<vi>(m.index + j * kLanes));
    store(m.to + at, x);
  }
}

// One layer and head of one call. With scratch, targets are gathered there: block k at k * block bytes.
struct HeadMove {
  const CompactArgs& args;
  const int64_t* kept;
  const MovePlan& plan;
  int64_t layer, head;
  char* scratch;  // null: straight into the targets

  bool stays(int64_t begin, int64_t end) const {  // slots [begin, end) of one block are where they belong
    const int64_t k = begin / args.cache.block_size;
    return scratch == nullptr && args.target_ids[k] == args.source_ids[k] && kept[end - 1] == end - 1;
  }
};

inline const char* source_vector(const HeadMove& h, int64_t source) {
  const CacheView& cache = h.args.cache;
  const int64_t slot = source * kLanes, size = cache.block_size;
  return k_block(cache, h.layer, h.args.source_ids[slot / size], h.head) + 4 * (slot % size);
}

inline void move_keys(const HeadMove& h) {
  const CacheView& cache = h.args.cache;
  const MovePlan& plan = h.plan;
  const int64_t words = k_words(cache), stride = k_word_stride(cache), size = cache.block_size;
  for (int64_t g = 0; g < plan.vectors; ++g) {
    const int64_t slot = g * kLanes, end = slot + kLanes < h.args.count ? slot + kLanes : h.args.count;
    if (h.stays(slot, end)) continue;
    const int first = plan.first[g], sources = plan.first[g + 1] - first;
    const int32_t last = plan.first[plan.vectors] - 1;
    const char *from[kLanes], *next[kLanes];
    for (int j = 0; j < sources; ++j) {
      const int32_t ahead = first + sources + j;
      from[j] = source_vector(h, plan.source[first + j]);
      next[j] = source_vector(h, plan.source[ahead < last ? ahead : last]);
    }
    const int64_t k = slot / size;
    char* block = h.scratch == nullptr ? k_block(cache, h.layer, h.args.target_ids[k], h.head)
                                       : h.scratch + k * k_block_bytes(cache);
    const int32_t* index = plan.index + (int64_t)first * kLanes;
    const VectorMove move{from, next, index, sources, block + 4 * (slot % size)};
    switch (sources) {
      case 1: move_vector<1>(move, words, stride); break;
      case 2: move_vector<2>(move, words, stride); break;
      case 3: move_vector<3>(move, words, stride); break;
      case 4: move_vector<4>(move, words, stride); break;
      default: move_vector_of_many(move, words, stride);
    }
  }
}

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
  return block + slot % size * (cache.v_dim * size_of(cache.format));
}

inline void move_values(const HeadMove& h) {
  const CacheView& cache = h.args.cache;
  const int64_t size = cache.block_size, row = cache.v_dim * size_of(cache.format);
  for (int64_t begin = 0; begin < h.args.count; begin += size) {
    const int64_t end = begin + size < h.args.count ? begin + size : h.args.count;
    if (h.stays(begin, end)) continue;
    const int64_t k = begin / size;
    char* block = h.scratch == nullptr ? v_block(cache, h.layer, h.args.target_ids[k], h.head)
                                       : h.scratch + k * v_block_bytes(cache);
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
  const int64_t size = cache.block_size, bytes = keys ? k_block_bytes(cache) : v_block_bytes(cache);
  for (int64_t k = 0; k * size < h.args.count; ++k) {
    const int64_t left = h.args.count - k * size, slots = left < size ? left : size;
    char* to = keys ? k_block(cache, h.layer, h.args.target_ids[k], h.head)
                    : v_block(cache, h.layer, h.args.target_ids[k], h.head);
    const char* from = h.scratch + k * bytes;
    if (!keys) {
      std::memcpy(to, from, slots * cache.v_dim * size_of(cache.format));
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

inline void compact(const CompactArgs& a) {
  const CacheView& cache = a.cache;
  if (a.count == 0) return;
  const int64_t rows = a.kept_layers * a.kept_heads, pairs = cache.layers * cache.heads;
  const int64_t sharing = pairs / rows;  // (layer, head) pairs of one row of kept slots
  const int64_t wanted = ceil_div(8 * (int64_t)max_threads(), rows);
  const int64_t parts = wanted < sharing ? wanted : sharing;
  const int64_t vectors = ceil_div(a.count, kLanes), targets = ceil_div(a.count, cache.block_size);
  const int64_t entries = MovePlan::most_entries(vectors, a.sources * cache.block_size / kLanes);
  const int64_t block = k_block_bytes(cache) > v_block_bytes(cache) ? k_block_bytes(cache) : v_block_bytes(cache);
  const int64_t spare = in_place(a) ? 0 : targets * block / 4;

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
      move_keys(move);
      if (spare > 0) spill(move, true);
      move_values(move);
      if (spare > 0) spill(move, false);
    }
  });
}

}  // namespace kvreclaim::KVR_NS
#endif
