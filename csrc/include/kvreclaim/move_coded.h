// Compaction of coded formats: values, whose words hold the tokens of one dim, and parameters, a byte per slot.
//
// A word is put together in a register from all that its tokens come from before it is stored. In place, a
// source word is never before the target word (kept[i] >= i), so nothing is read after it was overwritten.
// Codes and parameters move as they are: nothing is rounded again.
#pragma once

#include "kvreclaim/move.h"

#ifdef KVR_NS
namespace kvreclaim::KVR_NS {

// Tokens that follow one another in a source word: x |= ((word >> right) & mask) << left.
struct FieldRun {
  const char* from;  // dim 0 of the source's word row
  uint32_t mask;
  int right, left;
};

// A target word row as runs of its tokens.
struct WordMove {
  FieldRun runs[8];
  int count = 0;
};

KVR_INLINE const char* source_unit(const HeadMove& h, int64_t slot) {
  const CacheView& c = h.args.cache;
  return unit(c, h.layer, h.args.source_ids[slot / c.block_size], h.head);
}

inline WordMove plan_word(const HeadMove& h, int64_t begin, int64_t end) {
  const CacheView& c = h.args.cache;
  const int bits = (int)bits_of(c.formats.v), fields = 32 / bits;
  WordMove move;
  for (int64_t i = begin; i < end;) {
    const int64_t slot = h.kept[i], room = fields - slot % fields;
    int run = 1;
    while (i + run < end && run < room && h.kept[i + run] == slot + run) ++run;
    const int64_t row = slot % c.block_size / fields;
    const uint32_t mask = run * bits == 32 ? ~0u : (1u << (run * bits)) - 1u;
    move.runs[move.count++] = {source_unit(h, slot) + v_codes(c) + 4 * row * c.v_dim, mask,
                               (int)(slot % fields) * bits, (int)(i - begin) * bits};
    i += run;
  }
  return move;
}

template <int N>
KVR_INLINE void move_words(const WordMove& move, int64_t at, char* to) {
  vu x{};
  for (int i = 0; i < move.count; ++i) {
    const FieldRun& run = move.runs[i];
    vu word{};
    __builtin_memcpy(&word, run.from + at, 4 * N);
    x |= (word >> run.right & run.mask) << run.left;
  }
  __builtin_memcpy(to + at, &x, 4 * N);
}

inline void move_value_words(const HeadMove& h) {
  const CacheView& c = h.args.cache;
  const int64_t fields = 32 / bits_of(c.formats.v), size = c.block_size, bytes = 4 * c.v_dim;
  const int64_t count = h.args.count;
  for (int64_t begin = 0; begin < count; begin += fields) {
    const int64_t end = begin + fields < count ? begin + fields : count;
    if (h.stays(begin, end)) continue;
    const WordMove move = plan_word(h, begin, end);
    const int64_t k = begin / size;
    char* own = h.scratch == nullptr ? unit(c, h.layer, h.args.target_ids[k], h.head)
                                     : h.scratch + k * unit_bytes(c);
    char* to = own + v_codes(c) + begin % size / fields * bytes;
    int64_t at = 0;
    for (; at + 4 * kLanes <= bytes; at += 4 * kLanes) move_words<kLanes>(move, at, to);
    if constexpr (kLanes > 8) {
      if (at < bytes) move_words<8>(move, at, to);
    }
  }
}

inline void move_params(const HeadMove& h) {
  const CacheView& c = h.args.cache;
  const int64_t planes = slot_params(c), size = c.block_size;
  for (int64_t i = 0; i < h.args.count; ++i) {
    const int64_t k = i / size, slot = h.kept[i];
    if (h.stays(i, i + 1)) continue;
    char* own = h.scratch == nullptr ? unit(c, h.layer, h.args.target_ids[k], h.head)
                                     : h.scratch + k * unit_bytes(c);
    char* to = own + params(c) + i % size;
    const char* from = source_unit(h, slot) + params(c) + slot % size;
    for (int64_t p = 0; p < planes; ++p) to[p * size] = from[p * size];
  }
}

// Whole units from scratch to the targets, as far as they hold kept tokens.
inline void spill_units(const HeadMove& h) {
  const CacheView& c = h.args.cache;
  const int64_t size = c.block_size, fields = 32 / bits_of(c.formats.v);
  for (int64_t k = 0; k * size < h.args.count; ++k) {
    const int64_t left = h.args.count - k * size, slots = left < size ? left : size;
    char* to = unit(c, h.layer, h.args.target_ids[k], h.head);
    const char* from = h.scratch + k * unit_bytes(c);
    for (int64_t w = 0; w < k_words(c); ++w)
      std::memcpy(to + w * k_word_stride(c), from + w * k_word_stride(c), 4 * slots);
    std::memcpy(to + v_codes(c), from + v_codes(c), ceil_div(slots, fields) * 4 * c.v_dim);
    for (int64_t p = 0; p < slot_params(c); ++p)
      std::memcpy(to + params(c) + p * size, from + params(c) + p * size, slots);
  }
}

inline void move_coded(const HeadMove& h) {
  move_value_words(h);
  move_params(h);
  if (h.scratch != nullptr) spill_units(h);
}

}  // namespace kvreclaim::KVR_NS
#endif
