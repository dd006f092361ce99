// kivi4 by integer products (integer.h): keys by channel, whose scales are folded into the queries of each chunk, or
// by token, as int4's. A tile in which a block lies in an open row goes through panels.
#pragma once

#if defined(__AVX512VNNI__)
#include "kvreclaim/integer_loops.h"
#include "kvreclaim/panel.h"

namespace kvreclaim::KVR_NS {

// 16 whole numbers below 2^15 as high and low bytes from `at` on; the low ones are 4 * kPlane behind.
KVR_INLINE void store_bytes(Words x, char* at) {
  const Words upper = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
  _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8(upper));
  _mm_storeu_si128((__m128i*)(at + 4 * kPlane), _mm512_cvtepi32_epi8(x));
}

// Scores of R rows over a chunk whose keys lie by channel: q's dims times their scales are integers anew.
template <int R>
KVR_KERNEL void channel_scores(const CodedItem& at, const IntegerRows& rows, int64_t dims, const char* k,
                               const char* params, float* s) {
  constexpr Format F = Format::kKivi4;
  alignas(64) int32_t q[R * 2 * kPlane];
  vf scales[kMaxIntegerDims / kLanes], firsts[kMaxIntegerDims / kLanes];
  const ScaleTables tables = scale_tables<F>();
  for (int64_t v = 0; v < dims / kLanes; ++v) {
    const GroupParams own = group_params_at(params + dims + v * kLanes, params + v * kLanes, tables);
    scales[v] = own.scale * kCoarseUnit, firsts[v] = own.first;
  }
  float unit[R], offset[R];
  for (int r = 0; r < R; ++r) {
    vf folded[kMaxIntegerDims / kLanes], most{}, centres{};
    for (int64_t v = 0; v < dims / kLanes; ++v) {
      folded[v] = load<vf>(rows.plain + r * dims + v * kLanes) * scales[v];
      most = vmax(most, (vf)_mm512_abs_ps((__m512)folded[v]));
      centres += folded[v] * firsts[v];
    }
    const float largest = hmax(most) > 1e-30f ? hmax(most) : 1e-30f;
    const vf inverse = splat(kLargestInt16 / largest);
    for (int64_t v = 0; v < dims / kLanes; ++v)
      store_bytes(evens_first(_mm512_cvtps_epi32((__m512)(folded[v] * inverse))),
                  reinterpret_cast<char*>(q + r * 2 * kPlane) + v * kLanes);
    unit[r] = largest / kLargestInt16;
    offset[r] = hsum(centres) + rows.not_finite[r];
  }
  DigitSums<F> sums[R][1];
  add_words<R, 1, F>(q, dims / 8, at.k_stride, &k, &k, 0, sums);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(s + r * kTile, sums[r][0].total(0) * unit[r] + offset[r]);
}

// The same, keys by token.
template <int R>
KVR_KERNEL void token_scores(const CodedItem& at, const IntegerRows& rows, const char* k, const char* params, float* s) {
  constexpr Format F = Format::kKivi4;
  const ScaleTables tables = scale_tables<F>();
  for (int64_t g = 0; g < at.k_groups; ++g) {
    DigitSums<F> sums[R][1];
    add_words<R, 1, F>(rows.q + g * kGroup / 4, kGroup / 8, at.k_stride, &k, &k, g * kGroup / 8 * at.k_stride, sums);
    close_scores<R, 1, F>(at, rows, params, g, 0, sums, tables, s);
  }
  for (int r = 0; r < R; ++r) store(s + r * kTile, load<vf>(s + r * kTile) * rows.unit[r]);
}

// Scores of R rows over a tile in log2 units; the next tile's keys are fetched meanwhile.
template <int R>
inline void kivi_scores(const CodedItem& at, const IntegerRows& rows, int64_t dims, const CodedTile& tile,
                        const CodedTile& next, float* s) {
  for (int c = 0; c < kChunks; ++c) {
    const char* params = tile.p[c] - tile.slot[c];
    for (int64_t w = 0; w < dims / 8; ++w) prefetch(next.k[c] + w * at.k_stride);
    if ((uint8_t)params[at.kivi.state] == kKiviByToken)
      token_scores<R>(at, rows, tile.k[c], tile.p[c], s + c * kChunk);
    else
      channel_scores<R>(at, rows, dims, tile.k[c], params, s + c * kChunk);
  }
}

// Whether a block of the tile at slot `at` lies in an open row.
inline bool has_open_block(const AttentionArgs& a, const Item& item, int64_t at) {
  for (int64_t slot = at; slot < smaller(at + kTile, item.high); slot += kChunk) {
    const ChunkAt chunk = chunk_at(a, item, slot);
    if (open_row(a.cache, chunk, unit(a.cache, a.layer, chunk.block, chunk.head)) >= 0) return true;
  }
  return false;
}

// A group's rows over such a tile; what centres have added so far is scaled as the sums are.
inline void open_tile_rows(const AttentionArgs& a, const Item& item, int64_t at, const Panels& panels,
                           const TileMask& mask, RowGroup& group, const IntegerRows& rows) {
  alignas(64) float scores[kMaxR * kTile];
  const auto before = group.m;
  switch (group.count) {
    case 1: panel_rows<1>(a, item, at, panels, mask, group, scores); break;
    case 2: panel_rows<2>(a, item, at, panels, mask, group, scores); break;
    case 3: panel_rows<3>(a, item, at, panels, mask, group, scores); break;
    case 4: panel_rows<4>(a, item, at, panels, mask, group, scores); break;
    default: panel_rows<kMaxR>(a, item, at, panels, mask, group, scores);
  }
  for (int64_t r = 0; r < group.count; ++r) {
    if (group.m[r] == before[r]) continue;
    const float factor = exp2_scalar(before[r] - group.m[r]);
    for (int64_t g = 0; g < groups_of(a.cache.v_dim); ++g) {
      float* sums = rows.offsets + (g * group.count + r) * kLanes;
      store(sums, load<vf>(sums) * factor);
    }
  }
}

}  // namespace kvreclaim::KVR_NS
#endif
