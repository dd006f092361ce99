// Decode attention over int8 and int4 by integer products, where the CPU has the instruction; elsewhere such
// caches go through panels. One query token per item, so that all its rows see the same slots.
#pragma once

#if defined(__AVX512VNNI__)
#include "kvreclaim/integer_loops.h"
#endif
#include "kvreclaim/item.h"

namespace kvreclaim::KVR_NS {

#if defined(__AVX512VNNI__)

KVR_INLINE bool takes_integers(const AttentionArgs& a, const SequenceView& seq) {
  const CacheView& c = a.cache;
  const int64_t multiple = c.format == Format::kInt4 ? kGroup : kChunk;
  return (c.format == Format::kInt8 || c.format == Format::kInt4) && !c.latent && a.q.type != Type::kF32 &&
         seq.query_len == 1 && c.k_dim % multiple == 0 && c.v_dim % multiple == 0 && c.k_dim <= kMaxIntegerDims &&
         c.v_dim <= kMaxIntegerDims && group_size(a) <= kMaxRows;
}

// One row of q, scaled, as 16-bit integers in bytes. A q that is not finite makes a unit that is not.
template <int Bits>
inline void pack_query(const float* row, int64_t dims, int64_t r, int64_t count, IntegerRows& to) {
  vf most{}, all{};
  for (int64_t d = 0; d < dims; d += kLanes) {
    const vf x = (vf)_mm512_abs_ps((__m512)load<vf>(row + d));
    most = vmax(most, x);
    all += x - x;  // NaN if x is not finite
  }
  const float largest = hmax(most) > 1e-30f ? hmax(most) : 1e-30f, not_finite = hsum(all);
  to.unit[r] = largest / kLargestInt16 * (Bits == 4 ? kCoarseUnit : 1.0f) + not_finite;
  const vf inverse = splat(kLargestInt16 / largest);
  char* high = reinterpret_cast<char*>(to.q + r * 2 * kPlane);
  char* low = high + 4 * kPlane;
  Words sum = _mm512_setzero_si512();
  for (int64_t d = 0; d < dims; d += kLanes) {
    Words x = _mm512_cvtps_epi32((__m512)(load<vf>(row + d) * inverse));
    sum = _mm512_add_epi32(sum, x);
    if constexpr (Bits == 4) {
      x = evens_first(x);
      if (d % kGroup == kGroup - kLanes) {
        to.q_sums[d / kGroup * count + r] = (float)_mm512_reduce_add_epi32(sum);
        sum = _mm512_setzero_si512();
      }
    }
    const Words upper = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128((__m128i*)(high + d), _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128((__m128i*)(low + d), _mm512_cvtepi32_epi8(x));
  }
  to.bias[r] = Bits == 8 ? -128 * _mm512_reduce_add_epi32(sum) : 0;
}

// Slots of the tile at slot `at` that the item's rows see, a bit each.
inline uint64_t seen_slots(const AttentionArgs& a, const Item& item, const RowGroup& group, int64_t at,
                           const TileMask& mask) {
  bool hides;
  const RowBounds bounds = bounds_of(a, item, group, 0, at, mask, hides);
  if (!hides) return ~0ull;
  uint64_t seen = 0;
  alignas(64) float probe[kTile] = {};
  mask_row(probe, bounds, mask);
  for (int t = 0; t < kTile; ++t) seen |= (uint64_t)(probe[t] == 0.0f) << t;
  return seen;
}

template <int R, int Bits>
inline void coded_rows(const AttentionArgs& a, const CodedItem& at, const CodedTile& tile, const CodedTile& next,
                       uint64_t seen, int64_t tokens, RowGroup& group, const IntegerRows& rows) {
  alignas(64) float scores[R * kTile];
  alignas(64) int32_t p[kMaxIntegerGroups * R * 2 * kLanes];
  float units[kMaxIntegerGroups * R], alpha[kMaxR], score_units[R];
  coded_scores<R, Bits>(at, rows, k_words(a.cache), tile, next, scores);
  for (int r = 0; r < R; ++r) {
    score_units[r] = rows.unit[r];
    if (a.softcap != 0) {
      for (int t = 0; t < kTile; t += kLanes) {
        float* s = scores + r * kTile + t;
        store(s, load<vf>(s) * rows.unit[r]);
      }
      softcap_row(scores + r * kTile, a.softcap * kLog2e);
      score_units[r] = 1.0f;
    }
    if (seen != ~0ull)
      for (int c = 0; c < kChunks; ++c)
        _mm512_mask_storeu_ps(scores + r * kTile + c * kLanes, (__mmask16)(~seen >> (16 * c)),
                              (__m512)splat(kNegInf));
  }
  const TileWeights weights{p, units, alpha};
  coded_weights<R, Bits>(at, tile, next, seen, scores, score_units, rows.offsets, group, weights);
  all_coded_values<R, Bits>(at, tile, next, tokens, weights, group.acc);
}

// A head's rows on their way through an item.
struct IntegerHead {
  CodedItem at;
  IntegerRows rows[kMaxGroups];
};

template <int Bits>
inline void open_integer_head(const AttentionArgs& a, const Item& item, float* memory, HeadRows& to,
                              IntegerHead& head) {
  const int64_t dims = a.cache.k_dim, v_dims = a.cache.v_dim, v_groups = Bits == 4 ? groups_of(v_dims) : 1;
  const int64_t q_words = 2 * kPlane, offsets = v_groups * kLanes;
  float* row = memory + item.rows * v_dims;
  const RowMap map = row_map(item.seq, item.head, group_size(a));
  float* spare = row + item.rows * (q_words + offsets);
  head.at = coded_item(a, item);
  to.count = 0;
  for (int64_t r = 0; r < item.rows; r += to.groups[to.count++].count) {
    RowGroup& group = to.groups[to.count];
    group.count = group_rows(item.rows - r);
    group.acc = memory + r * v_dims;
    reset(group, v_dims);
    open_bounds(a, item, item.row + r, group);
    IntegerRows& own = head.rows[to.count];
    own.q = reinterpret_cast<int32_t*>(row + r * q_words);
    own.offsets = row + item.rows * q_words + r * offsets;
    std::memset(own.offsets, 0, group.count * offsets * sizeof(float));
    for (int64_t j = 0; j < group.count; ++j) {
      unpack_row(a.q, row_address(a.q, map, item.row + r + j), dims, query_scale(a), spare, 1);
      if (is_rotated(a.cache.format)) rotate_query(a.cache, spare);
      pack_query<Bits>(spare, dims, j, group.count, own);
    }
  }
}

// All rows of a head over the tile at slot `at`.
template <int Bits>
inline void coded_step(const AttentionArgs& a, const Item& item, int64_t at, HeadRows& to, const IntegerHead& head) {
  CodedTile tile, next;
  TileMask mask;
  open_mask(a, item, at, mask);
  const uint64_t seen = seen_slots(a, item, to.groups[0], at, mask);
  if (seen == 0) return;
  open_coded(a, item, head.at, at, tile);
  open_coded(a, item, head.at, smaller(at + kTile, item.high - 1), next);
  const int64_t tokens = smaller(kTile, item.high - at);
  for (int g = 0; g < to.count; ++g) {
    const CodedTile& ahead = g + 1 < to.count ? tile : next;
    RowGroup& group = to.groups[g];
    switch (group.count) {
      case 1: coded_rows<1, Bits>(a, head.at, tile, ahead, seen, tokens, group, head.rows[g]); break;
      case 2: coded_rows<2, Bits>(a, head.at, tile, ahead, seen, tokens, group, head.rows[g]); break;
      case 3: coded_rows<3, Bits>(a, head.at, tile, ahead, seen, tokens, group, head.rows[g]); break;
      case 4: coded_rows<4, Bits>(a, head.at, tile, ahead, seen, tokens, group, head.rows[g]); break;
      default: coded_rows<kMaxR, Bits>(a, head.at, tile, ahead, seen, tokens, group, head.rows[g]);
    }
  }
}

template <int Bits>
inline void close_integer_head(const AttentionArgs& a, HeadRows& to, const IntegerHead& head) {
  const int64_t v_dims = a.cache.v_dim, v_groups = Bits == 4 ? groups_of(v_dims) : 1;
  for (int i = 0; i < to.count; ++i)
    for (int64_t g = 0; g < v_groups; ++g)
      for (int64_t j = 0; j < to.groups[i].count; ++j) {
        const float offset = hsum(load<vf>(head.rows[i].offsets + (g * to.groups[i].count + j) * kLanes));
        const int64_t from = Bits == 4 ? g * kGroup : 0, width = Bits == 4 ? kGroup : v_dims;
        float* sums = to.groups[i].acc + j * v_dims + from;
        for (int64_t d = 0; d < width; ++d) sums[d] = (sums[d] + offset) * (Bits == 4 ? kCoarseUnit : 1.0f);
      }
}

// Heads item.head .. item.head + run of an item, tile by tile; leaves their sums in `heads`.
template <int Bits>
inline void run_integers(const AttentionArgs& a, const Item& item, int64_t run, HeadRows* heads) {
  const int64_t dims = a.cache.k_dim, v_dims = a.cache.v_dim, v_groups = Bits == 4 ? groups_of(v_dims) : 1;
  const int64_t floats = item.rows * (v_dims + 2 * kPlane + v_groups * kLanes) + dims;
  float* memory = thread_scratch(run * floats);
  IntegerHead own[kMaxRun];
  for (int64_t h = 0; h < run; ++h)
    open_integer_head<Bits>(a, of_head(item, h), memory + h * floats, heads[h], own[h]);
  for (int64_t at = first_tile(a, item); at < item.high; at += kTile)
    for (int64_t h = 0; h < run; ++h) coded_step<Bits>(a, of_head(item, h), at, heads[h], own[h]);
  for (int64_t h = 0; h < run; ++h) close_integer_head<Bits>(a, heads[h], own[h]);
}

inline void run_integers(const AttentionArgs& a, const Item& item, int64_t run, HeadRows* heads) {
  a.cache.format == Format::kInt8 ? run_integers<8>(a, item, run, heads) : run_integers<4>(a, item, run, heads);
}

#else

KVR_INLINE bool takes_integers(const AttentionArgs&, const SequenceView&) { return false; }
inline void run_integers(const AttentionArgs&, const Item&, int64_t, HeadRows*) {}

#endif

}  // namespace kvreclaim::KVR_NS
