// Decode attention over int8, int4, int8+int4 and turboquant4 by integer products, where the CPU has the instruction;
// elsewhere such caches go through panels.
#pragma once

#include "kvreclaim/integer_loops.h"
#include "kvreclaim/item.h"

namespace kvreclaim::KVR_NS {

#if defined(__AVX512VNNI__)

constexpr bool has_integers(Format f) {
  return f == Format::kInt8 || f == Format::kInt4 || f == Format::kTurbo4;
}
constexpr int64_t integer_multiple(Format f) { return has_groups(f) ? kGroup : kChunk; }  // of dims

KVR_INLINE bool takes_integers(const AttentionArgs& a, const SequenceView& seq) {
  const CacheView& c = a.cache;
  return has_integers(c.formats.k) && has_integers(c.formats.v) && !c.latent && a.q.type != Type::kF32 &&
         seq.query_len <= kExactQueries && c.k_dim % integer_multiple(c.formats.k) == 0 &&
         c.v_dim % integer_multiple(c.formats.v) == 0 && c.k_dim <= kMaxIntegerDims && c.v_dim <= kMaxIntegerDims &&
         group_size(a) <= kMaxRows;
}

// 16 whole numbers below 2^15 as high and low bytes from `at` on; the low ones are 4 * kPlane behind.
KVR_INLINE void store_bytes(Words x, char* at) {
  const Words upper = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
  _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8(upper));
  _mm_storeu_si128((__m128i*)(at + 4 * kPlane), _mm512_cvtepi32_epi8(x));
}

// One row of q, scaled, as 16-bit integers in bytes. A q that is not finite makes a unit that is not.
template <Format F>
inline void pack_query(const float* row, int64_t dims, int64_t r, int64_t count, IntegerRows& to) {
  vf most{}, all{};
  for (int64_t d = 0; d < dims; d += kLanes) {
    const vf x = (vf)_mm512_abs_ps((__m512)load<vf>(row + d));
    most = vmax(most, x);
    all += x - x;  // NaN if x is not finite
  }
  const float largest = hmax(most) > 1e-30f ? hmax(most) : 1e-30f;
  to.not_finite[r] = hsum(all);
  to.unit[r] = largest / kLargestInt16 * (has_groups(F) ? kCoarseUnit : code_unit(F)) + to.not_finite[r];
  const vf inverse = splat(kLargestInt16 / largest);
  Words sum = _mm512_setzero_si512();
  for (int64_t d = 0; d < dims; d += kLanes) {
    Words x = _mm512_cvtps_epi32((__m512)(load<vf>(row + d) * inverse));
    sum = _mm512_add_epi32(sum, x);
    if constexpr (bits_of(F) == 4) x = evens_first(x);
    store_bytes(x, reinterpret_cast<char*>(to.q + r * 2 * kPlane) + d);
    if (has_groups(F) && d % kGroup == kGroup - kLanes) {
      to.q_sums[d / kGroup * count + r] = (float)_mm512_reduce_add_epi32(sum);
      sum = _mm512_setzero_si512();
    }
  }
  if constexpr (F == Format::kInt8) to.bias[r] = -128 * _mm512_reduce_add_epi32(sum);
  if constexpr (has_two_bytes(F)) to.q_sums[r] = (float)_mm512_reduce_add_epi32(sum);
}

// Slots of the tile at slot `at` that each row of a group sees, a bit each.
inline SeenSlots seen_slots(const AttentionArgs& a, const Item& item, const RowGroup& group, int64_t at,
                            const TileMask& mask) {
  SeenSlots seen{true, 0, {}};
  const int64_t last = group.count - 1;  // bounds rise from row to row
  if (group.low[last] <= at && at + kTile <= smaller(item.high, group.end[0]) && !mask.has_positions) {
    seen.any = ~0ull;
    for (int64_t r = 0; r < group.count; ++r) seen.by[r] = ~0ull;
    return seen;
  }
  for (int64_t r = 0; r < group.count; ++r) {
    const bool is_new = r == 0 || group.end[r] != group.end[r - 1];  // query
    seen.by[r] = is_new ? ~0ull : seen.by[r - 1];
    bool hides;
    const RowBounds bounds = bounds_of(a, item, group, r, at, mask, hides);
    if (is_new && hides) {
      alignas(64) float probe[kTile] = {};
      mask_row(probe, bounds, mask);
      seen.by[r] = 0;
      for (int t = 0; t < kTile; ++t) seen.by[r] |= (uint64_t)(probe[t] == 0.0f) << t;
    }
    seen.any |= seen.by[r];
    seen.is_same &= seen.by[r] == seen.by[0];
  }
  return seen;
}

template <int R, Format K, Format V>
inline void coded_rows(const AttentionArgs& a, const CodedItem& at, const CodedTile& tile, const CodedTile& next,
                       const SeenSlots& seen, int64_t tokens, RowGroup& group, const IntegerRows& rows) {
  alignas(64) float scores[R * kTile];
  alignas(64) int32_t p[kMaxIntegerGroups * R * 2 * kLanes];
  float units[kMaxIntegerGroups * R], alpha[kMaxR], score_units[R];
  coded_scores<R, K>(at, rows, tile, next, scores);
  for (int r = 0; r < R; ++r) {
    score_units[r] = rows.unit[r];
    if (a.softcap != 0) {
      for (int t = 0; t < kTile; t += kLanes) {
        float* s = scores + r * kTile + t;
        store(s, load<vf>(s) * score_units[r]);
      }
      softcap_row(scores + r * kTile, a.softcap * kLog2e);
      score_units[r] = 1.0f;
    }
    if (seen.by[r] != ~0ull)
      for (int c = 0; c < kChunks; ++c)
        _mm512_mask_storeu_ps(scores + r * kTile + c * kLanes, (__mmask16)(~seen.by[r] >> (16 * c)),
                              (__m512)splat(kNegInf));
  }
  const TileWeights weights{p, units, alpha};
  coded_weights<R, V>(at, tile, next, seen, scores, score_units, rows.offsets, group, weights);
  all_coded_values<R, V>(at, tile, next, tokens, weights, group.acc);
}

// A head's rows on their way through an item.
struct IntegerHead {
  CodedItem at;
  IntegerRows rows[kMaxGroups];
};

// Floats of a head's sums, packed queries, what centres add, and a row to spare.
inline int64_t integer_floats(const CacheView& c, int64_t rows) {
  return rows * (c.v_dim + 2 * kPlane + scale_groups(c.formats.v, c.v_dim) * kLanes) + c.k_dim;
}

template <Format F>
inline void open_integer_rows(const AttentionArgs& a, const RowMap& map, int64_t first, float* spare,
                              const RowGroup& group, IntegerRows& to) {
  const int64_t dims = a.cache.k_dim;
  for (int64_t j = 0; j < group.count; ++j) {
    unpack_row(a.q, row_address(a.q, map, first + j), dims, query_scale(a), spare, 1);
    if (is_rotated(F)) rotate_query(a.cache, spare);
    pack_query<F>(spare, dims, j, group.count, to);
  }
}

template <Format K, Format V>
inline void open_integer_head(const AttentionArgs& a, const Item& item, float* memory, HeadRows& to,
                              IntegerHead& head) {
  const int64_t v_dims = a.cache.v_dim;
  const int64_t q_words = 2 * kPlane, offsets = scale_groups(V, v_dims) * kLanes;
  float* q = memory + item.rows * v_dims;
  float* centres = q + item.rows * q_words;
  float* spare = centres + item.rows * offsets;
  const RowMap map = row_map(item.seq, item.head, group_size(a));
  head.at = coded_item(a, item);
  to.count = 0;
  for (int64_t r = 0; r < item.rows; r += to.groups[to.count++].count) {
    RowGroup& group = to.groups[to.count];
    group.count = group_rows(item.rows - r);
    group.acc = memory + r * v_dims;
    reset(group, v_dims);
    open_bounds(a, item, item.row + r, group);
    IntegerRows& own = head.rows[to.count];
    own.q = reinterpret_cast<int32_t*>(q + r * q_words);
    own.offsets = centres + r * offsets;
    std::memset(own.offsets, 0, group.count * offsets * sizeof(float));
    open_integer_rows<K>(a, map, item.row + r, spare, group, own);
  }
}

// All rows of a head over the tile at slot `at`, `next` being fetched meanwhile.
template <Format K, Format V>
inline void coded_step(const AttentionArgs& a, const Item& item, int64_t at, const CodedTile& tile,
                       const CodedTile& next, HeadRows& to, const IntegerHead& head) {
  TileMask mask;
  open_mask(a, item, at, mask);
  const int64_t tokens = smaller(kTile, item.high - at);
  for (int g = 0; g < to.count; ++g) {
    const CodedTile& ahead = g + 1 < to.count ? tile : next;
    RowGroup& group = to.groups[g];
    const SeenSlots seen = seen_slots(a, item, group, at, mask);
    if (seen.any == 0) continue;
    switch (group.count) {
      case 1: coded_rows<1, K, V>(a, head.at, tile, ahead, seen, tokens, group, head.rows[g]); break;
      case 2: coded_rows<2, K, V>(a, head.at, tile, ahead, seen, tokens, group, head.rows[g]); break;
      case 3: coded_rows<3, K, V>(a, head.at, tile, ahead, seen, tokens, group, head.rows[g]); break;
      case 4: coded_rows<4, K, V>(a, head.at, tile, ahead, seen, tokens, group, head.rows[g]); break;
      default: coded_rows<kMaxR, K, V>(a, head.at, tile, ahead, seen, tokens, group, head.rows[g]);
    }
  }
}

template <Format F>
inline void close_integer_head(const AttentionArgs& a, HeadRows& to, const IntegerHead& head) {
  const int64_t v_dims = a.cache.v_dim, groups = scale_groups(F, v_dims), width = has_groups(F) ? kGroup : v_dims;
  constexpr float unit = has_groups(F) ? kCoarseUnit : 1.0f;
  for (int i = 0; i < to.count; ++i)
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t j = 0; j < to.groups[i].count; ++j) {
        const float offset = hsum(load<vf>(head.rows[i].offsets + (g * to.groups[i].count + j) * kLanes));
        float* sums = to.groups[i].acc + j * v_dims + g * width;
        for (int64_t d = 0; d < width; ++d) sums[d] = (sums[d] + offset) * unit;
      }
}

// Heads item.head .. item.head + run of an item, tile by tile; leaves their sums in `heads`.
template <Format K, Format V>
inline void run_integers(const AttentionArgs& a, const Item& item, int64_t run, HeadRows* heads) {
  const int64_t floats = div_up(integer_floats(a.cache, item.rows), 16) * 16;
  float* memory = thread_scratch(run * floats);
  IntegerHead own[kMaxRun];
  for (int64_t h = 0; h < run; ++h)
    open_integer_head<K, V>(a, of_head(item, h), memory + h * floats, heads[h], own[h]);
  CodedTile tile, next;
  open_coded(a, item, own[0].at, first_tile(a, item), tile);
  for (int64_t at = first_tile(a, item); at < item.high; at += kTile)
    for (int64_t h = 0; h < run; ++h, tile = next) {
      const bool last = h + 1 == run;
      open_coded(a, item, own[last ? 0 : h + 1].at, last ? smaller(at + kTile, item.high - 1) : at, next);
      coded_step<K, V>(a, of_head(item, h), at, tile, next, heads[h], own[h]);
    }
  for (int64_t h = 0; h < run; ++h) close_integer_head<V>(a, heads[h], own[h]);
}

inline void run_integers(const AttentionArgs& a, const Item& item, int64_t run, HeadRows* heads) {
  const Formats formats = a.cache.formats;
  if (formats.k == Format::kInt8 && formats.v == Format::kInt4)
    return run_integers<Format::kInt8, Format::kInt4>(a, item, run, heads);
  switch (formats.k) {
    case Format::kInt8: return run_integers<Format::kInt8, Format::kInt8>(a, item, run, heads);
    case Format::kInt4: return run_integers<Format::kInt4, Format::kInt4>(a, item, run, heads);
    default: return run_integers<Format::kTurbo4, Format::kTurbo4>(a, item, run, heads);
  }
}

#else

KVR_INLINE bool takes_integers(const AttentionArgs&, const SequenceView&) { return false; }
inline void run_integers(const AttentionArgs&, const Item&, int64_t, HeadRows*) {}

#endif

}  // namespace kvreclaim::KVR_NS
