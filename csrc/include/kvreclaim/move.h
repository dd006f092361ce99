// What compaction moves, and the keys' words. Tokens lie along the lanes there, in every format, so a target
// vector is put together from the few source vectors that hold its tokens by one two-source permutation per
// further source; the permutations are worked out once per set of kept slots and serve all word rows, and all
// layers and heads that share the set.
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

// First key word of a block of a head; plain keys and values take turns in scratch, a unit is there as a whole.
KVR_INLINE char* first_key(const CacheView& c, int64_t layer, int64_t block, int64_t head) {
  return is_plain(c.formats) ? k_block(c, layer, block, head) : unit(c, layer, block, head);
}
KVR_INLINE int64_t scratch_bytes(const CacheView& c) {
  if (!is_plain(c.formats)) return unit_bytes(c);
  return k_block_bytes(c) > v_block_bytes(c) ? k_block_bytes(c) : v_block_bytes(c);
}

inline const char* source_vector(const HeadMove& h, int64_t source) {
  const CacheView& cache = h.args.cache;
  const int64_t slot = source * kLanes, size = cache.block_size;
  return first_key(cache, h.layer, h.args.source_ids[slot / size], h.head) + 4 * (slot % size);
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
    char* block = h.scratch == nullptr ? first_key(cache, h.layer, h.args.target_ids[k], h.head)
                                       : h.scratch + k * scratch_bytes(cache);
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

}  // namespace kvreclaim::KVR_NS
#endif
