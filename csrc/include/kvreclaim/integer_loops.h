// The three inner loops of decode attention over int8 and int4 by integer products (integer.h), for CPUs that
// multiply bytes (AVX-512 VNNI): scores, weights, weighted values of one tile.
//
// vpdpbusd sums four products of an unsigned by a signed byte, which are a word's codes and a word of q or p. q
// and the softmax's weights are 16-bit integers, 256 * high + low, whose high and low bytes are multiplied
// apart: as many instructions as 16-bit products, but codes need no unpacking (int8) or one mask (int4). So
// nothing is rounded to 8 bits: what is lost is 2^-16 of the largest |q| and of a tile's largest weight.
//
//   keys    score = scale(t) q . (n + centre(t))      per group of dims that share a scale
//   values  sum_t p(t) scale(t) (n + centre(t))       p(t) scale(t) in units of a bound of it over the tile;
//                                                     centres are summed apart, in fp32
// with n the stored code.
#pragma once

#include <type_traits>

#include "kvreclaim/item.h"
#include "kvreclaim/scale.h"

namespace kvreclaim::KVR_NS {

constexpr int64_t kMaxIntegerDims = 256;  // a score over more could leave 32 bits
constexpr int kPlane = (int)kMaxIntegerDims / 4;  // words of a row's high, and then low, bytes of q
constexpr int kMaxIntegerGroups = (int)(kMaxIntegerDims / kGroup);
constexpr float kLargestInt16 = 127 * 256 + 127;  // of 16-bit numbers whose high byte stays below 128

// Vectors of tokens, or of dims, that share a byte broadcast: with R rows, high and low, 16 accumulators.
template <int R>
constexpr int kIntegerVecs = R <= 2 ? 4 : R <= 4 ? 2 : 1;
using Words = __m512i;

// In assembly, since GCC copies the accumulator of the intrinsic before each use.
KVR_INLINE Words dot4(Words sum, Words codes, Words bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(bytes));
  return sum;
}

// Four words in each quarter of a vector, and word J of them everywhere: cheaper than broadcasts from memory.
KVR_INLINE Words four_words(const int32_t* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
template <int J>
KVR_INLINE Words word_of(Words four) {
  return _mm512_shuffle_epi32(four, (_MM_PERM_ENUM)(J * 0x55));
}
KVR_INLINE Words broadcast_word(int32_t x) { return _mm512_set1_epi32(x); }

// Byte vectors of a word row of codes: all of it (8 bits), or the numbers at even and at odd places (4 bits).
template <int Bits, int Odd>
KVR_INLINE Words codes_of(Words x) {
  if constexpr (Bits == 8) return x;
  return _mm512_and_si512(Odd ? _mm512_srli_epi32(x, 4) : x, _mm512_set1_epi8(15));
}

// The numbers of eight tokens or dims that share a word of 4-bit codes: even places, then odd ones.
KVR_INLINE Words evens_first(Words x) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15), x);
}

KVR_INLINE Words bytes_at(const char* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }

// Addresses of a tile's four chunks: first word row of keys and values, first plane of parameters.
struct CodedTile {
  const char *k[kChunks], *v[kChunks], *p[kChunks];
};

// Where the tiles of an item lie.
struct CodedItem {
  const char* units;  // of block 0
  int64_t block_bytes, k_stride, v_stride, plane;
  int64_t v_codes, params, v_row_bytes;
  int64_t k_groups, v_groups, v_dim;  // groups: planes of parameters, 1 in int8
};

inline CodedItem coded_item(const AttentionArgs& a, const Item& item) {
  const CacheView& c = a.cache;
  const bool is_int4 = c.format == Format::kInt4;
  return {unit(c, a.layer, 0, item.head), unit_bytes(c) * c.heads, k_word_stride(c), 4 * c.v_dim, c.block_size,
          v_codes(c), params(c), c.v_dim * bits_of(c.format) / 8,
          is_int4 ? groups_of(c.k_dim) : 1, is_int4 ? groups_of(c.v_dim) : 1, c.v_dim};
}

inline void open_coded(const AttentionArgs& a, const Item& item, const CodedItem& at_block, int64_t at,
                       CodedTile& tile) {
  const uint64_t size = (uint64_t)a.cache.block_size;
  const int shift = size & (size - 1) ? -1 : __builtin_ctzll(size);
  for (int c = 0; c < kChunks; ++c) {
    const int64_t slot = smaller(at + c * kChunk, (item.high - 1) / kChunk * kChunk);
    const int64_t index = shift >= 0 ? slot >> shift : slot / (int64_t)size, offset = slot - index * (int64_t)size;
    const char* own = at_block.units + item.seq.block_ids[index] * at_block.block_bytes;
    tile.k[c] = own + 4 * offset;
    tile.v[c] = own + at_block.v_codes + offset * at_block.v_row_bytes;
    tile.p[c] = own + at_block.params + offset;
  }
}

// fine() and coarse() of scale.h with the octave or-ed into the exponent: tables in units of 2^-15.
struct ScaleTables {
  Words sixteenths;
  vf steps;  // 2^(m/256), and the unit of the format
};

KVR_INLINE ScaleTables scale_tables() {
  return {_mm512_sub_epi32(_mm512_load_si512(kSixteenths), _mm512_set1_epi32(15 << 23)),
          load<vf>(k256ths) * power_of_two(15 - fine_bias(Format::kInt8))};
}
constexpr float kCoarseUnit = 32;  // 2^(15 - kCoarseBias)

KVR_INLINE Words with_octave(Words table, Words octave_bits) {  // table | (octave_bits & 15 << 23)
  return _mm512_ternarylogic_epi32(octave_bits, _mm512_set1_epi32(15 << 23), table, 0xEA);
}

template <int Side>
KVR_INLINE vf int8_scale(const char* planes, int64_t plane, const ScaleTables& tables) {
  const Words low = bytes_at(planes + Side * plane), high = bytes_at(planes + 2 * plane);
  const Words coarse_bits = _mm512_permutexvar_epi32(_mm512_srli_epi32(low, 4), tables.sixteenths);
  const Words octave = _mm512_slli_epi32(high, Side == 0 ? 23 : 19);
  return (vf)with_octave(coarse_bits, octave) * (vf)_mm512_permutexvar_ps(low, (__m512)tables.steps);
}

// scale in units of 1 / kCoarseUnit, and what joins the codes.
struct Int4Params {
  vf scale, first;
};

KVR_INLINE Int4Params int4_params(const char* planes, int64_t plane, const ScaleTables& tables) {
  const Words code = bytes_at(planes), centre = bytes_at(planes + plane);
  const __mmask16 live = _mm512_test_epi32_mask(centre, centre);
  const Words bits = with_octave(_mm512_permutexvar_epi32(code, tables.sixteenths), _mm512_slli_epi32(code, 19));
  const vf scale = (vf)_mm512_maskz_mov_epi32(live, bits);
  return {scale, (vf)_mm512_cvtepi32_ps(centre) * (1.0f / 3.0f) - (128.0f / 3.0f + 7.5f)};
}

// A group's rows: q as bytes, and what belongs to them.
struct IntegerRows {
  int32_t* q;                                // [R][2][kPlane]: high bytes, low bytes
  float* offsets;                            // [groups][R][kLanes]: of the values' centres
  float unit[kMaxR];                         // of a score: q's unit, and that of the scales
  int32_t bias[kMaxR];                       // int8: -128 sum of q
  float q_sums[kMaxIntegerGroups * kMaxR];   // int4: [group][R] sums of q
};

// s[r * kTile + t] = score of R rows and all tokens of the tile in units of rows.unit. Meanwhile most of the
// next tile's keys are fetched; fetching is spread over all loops of a tile, memory being slower than any.
template <int R, int Bits>
KVR_KERNEL void coded_scores(const CodedItem& at, const IntegerRows& rows, int64_t k_words, const CodedTile& tile,
                             const CodedTile& next, float* s) {
  constexpr int T = kIntegerVecs<R>;
  const int64_t words = Bits == 8 ? k_words : kGroup / 8;  // of a group
  const ScaleTables tables = scale_tables();
  for (int pass = 0; pass < kChunks / T; ++pass) {
    const char *base[T], *ahead[T];
    for (int t = 0; t < T; ++t) base[t] = tile.k[pass * T + t], ahead[t] = next.k[pass * T + t];
    const int32_t* q = rows.q;
    int64_t from = 0;
    for (int64_t g = 0; g < at.k_groups; ++g) {
      Words high[R][T], low[R][T];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) high[r][t] = low[r][t] = _mm512_setzero_si512();
#pragma GCC unroll 1
      for (int64_t w = 0; w < words; w += Bits == 8 ? 4 : 2, q += 4) {
        Words x[T], upper[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) upper[r] = four_words(q + r * 2 * kPlane);
        const auto step = [&](auto index) __attribute__((always_inline)) {
          constexpr int j = decltype(index)::value;
          if constexpr (Bits == 8 || j % 2 == 0) {
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) {
              x[t] = _mm512_loadu_si512(base[t] + from);
              if (pass * T + t < kChunks - 1) prefetch(ahead[t] + from);
            }
            from += at.k_stride;
          }
          Words y[T];
#pragma GCC unroll 4
          for (int t = 0; t < T; ++t) y[t] = codes_of<Bits, j % 2>(x[t]);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const Words a = word_of<j>(upper[r]), b = broadcast_word(q[(r * 2 + 1) * kPlane + j]);
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) {
              high[r][t] = dot4(high[r][t], y[t], a);
              low[r][t] = dot4(low[r][t], y[t], b);
            }
          }
        };
        step(std::integral_constant<int, 0>{}), step(std::integral_constant<int, 1>{});
        step(std::integral_constant<int, 2>{}), step(std::integral_constant<int, 3>{});
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const char* planes = tile.p[pass * T + t];
        Int4Params group{};
        if constexpr (Bits == 8)
          group.scale = int8_scale<0>(planes, at.plane, tables);
        else
          group = int4_params(planes + 2 * g * at.plane, at.plane, tables);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          float* to = s + r * kTile + (pass * T + t) * kLanes;
          const Words whole = _mm512_add_epi32(_mm512_slli_epi32(high[r][t], 8), low[r][t]);
          if constexpr (Bits == 8) {
            store(to, group.scale * (vf)_mm512_cvtepi32_ps(_mm512_add_epi32(whole, broadcast_word(rows.bias[r]))));
          } else {
            vf sum = group.scale * ((vf)_mm512_cvtepi32_ps(whole) + group.first * rows.q_sums[g * R + r]);
            if (g > 0) sum += load<vf>(to);
            store(to, sum);
          }
        }
      }
    }
  }
}

// 2^x for x <= 0 down to -126, relative error below 3e-6; below that, 2^-126.
KVR_INLINE vf exp2_weight(vf x) {
  const vf magic = splat(12582912.0f);  // see exp2v
  x = vmax(splat(-126.0f), x);
  const vf shifted = x + magic, f = x - (shifted - magic);
  vf p = splat(0.00958285f);  // least relative error of degree 4 on [-1/2, 1/2], p(0) = 1
  p = p * f + splat(0.05590643f);
  p = p * f + splat(0.24024099f);
  p = p * f + splat(0.69312419f);
  p = p * f + splat(1.0f);
  return (vf)((vi)p + ((vi)shifted << 23));
}

// What a tile's softmax leaves for its values.
struct TileWeights {
  int32_t* p;           // [groups][R][2][kLanes]: high bytes, low bytes; word 4 c + i is chunk c's word i
  float *unit, *alpha;  // [groups][R] of p; [R] of what was summed before
};

// The exponent of a bound of the scales of a group's values over the tile's visible tokens.
template <int Bits>
KVR_INLINE int scale_bound(const CodedTile& tile, int64_t offset, uint64_t seen) {
  __m128i most = _mm_setzero_si128();
#pragma GCC unroll 4
  for (int c = 0; c < kChunks; ++c)
    most = _mm_max_epu8(most, _mm_maskz_loadu_epi8((__mmask16)(seen >> (16 * c)), tile.p[c] + offset));
  most = _mm_max_epu8(most, _mm_srli_epi16(most, 8));  // of each pair in its low byte
  const __m128i least = _mm_minpos_epu16(_mm_andnot_si128(most, _mm_set1_epi16(255)));
  const int octave = (255 - _mm_cvtsi128_si32(least) % 256) >> 4;
  return octave + 1 - (Bits == 8 ? fine_bias(Format::kInt8) : 15);
}

// Scores -> weights 2^(s - m) times the values' scales, as 16-bit integers in bytes, against the tile's own
// maximum: against the row's, thousands of small ones would round to nothing.
template <int R, int Bits>
KVR_KERNEL void coded_weights(const CodedItem& at, const CodedTile& tile, const CodedTile& next, uint64_t seen,
                              const float* s, const float* unit, float* offsets, RowGroup& group,
                              const TileWeights& to) {
  using M = Vec<kMaxR>::F;
  const int64_t lines = at.v_row_bytes / 4;  // of a chunk's values; about as many as of its keys
  M best{}, units{};
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    vf top = load<vf>(s + r * kTile);
#pragma GCC unroll 4
    for (int t = kLanes; t < kTile; t += kLanes) top = vmax(top, load<vf>(s + r * kTile + t));
    best[r] = hmax(top);
    units[r] = unit[r];
  }
  const M tops = best;  // taken off before scaling: never rounded apart, so no weight is above 1
  best *= units;
  const M m = vmax(group.m, best), factor = exp2v(group.m - m), share = exp2v(best - m);
  group.m = m;
  store(to.alpha, factor);
  vf weights[R][kChunks];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    vf sum{};
#pragma GCC unroll 4
    for (int c = 0; c < kChunks; ++c) {
      weights[r][c] = exp2_weight((load<vf>(s + r * kTile + c * kLanes) - tops[r]) * unit[r]);
      sum += weights[r][c];
    }
    group.sum[r] = group.sum[r] * factor[r] + sum * share[r];
    for (int64_t line = r; line < lines; line += R) {
      prefetch(next.k[kChunks - 1] + line * at.k_stride);
      prefetch(next.v[0] + line * 64);
    }
  }
  const ScaleTables tables = scale_tables();
  const Words turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const int64_t first_plane = Bits == 8 ? 0 : 2 * at.k_groups * at.plane;
  for (int64_t g = 0; g < at.v_groups; ++g) {
    const int64_t planes = first_plane + 2 * g * at.plane;
    const int bound = scale_bound<Bits>(tile, Bits == 8 ? 2 * at.plane : planes, seen);
    const vf inverse = splat(kLargestInt16 * power_of_two(-bound));
    vf scale[kChunks], first[kChunks];
#pragma GCC unroll 4
    for (int c = 0; c < kChunks; ++c) {
      if constexpr (Bits == 8) {
        scale[c] = int8_scale<1>(tile.p[c], at.plane, tables) * inverse;
      } else {
        const Int4Params own = int4_params(tile.p[c] + planes, at.plane, tables);
        scale[c] = own.scale * inverse, first[c] = own.first;
      }
      prefetch(next.p[c] + 64 * g);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      Words x[kChunks], total = _mm512_setzero_si512();
      vf centres{};
#pragma GCC unroll 4
      for (int c = 0; c < kChunks; ++c) {
        x[c] = _mm512_cvtps_epi32((__m512)(weights[r][c] * scale[c]));
        if constexpr (Bits == 8)
          total = _mm512_add_epi32(total, x[c]);
        else  // of the rounded weight, as its codes are: what rounding adds is then as small as the number
          centres += (vf)_mm512_cvtepi32_ps(x[c]) * first[c], x[c] = evens_first(x[c]);
      }
      const Words a = _mm512_packs_epi32(x[0], x[1]), b = _mm512_packs_epi32(x[2], x[3]);
      const Words half = _mm512_set1_epi16(128), byte = _mm512_set1_epi16(255);
      const Words high = _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(a, half), 8),
                                            _mm512_srai_epi16(_mm512_add_epi16(b, half), 8));
      const Words low = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
      int32_t* p = to.p + (g * R + r) * 2 * kLanes;
      _mm512_storeu_si512(p, _mm512_permutexvar_epi32(turn, high));
      _mm512_storeu_si512(p + kLanes, _mm512_permutexvar_epi32(turn, low));
      const float own_unit = share[r] * power_of_two(bound) * (1.0f / kLargestInt16);
      to.unit[g * R + r] = own_unit;
      float* sums = offsets + (g * R + r) * kLanes;
      if constexpr (Bits == 8)
        centres = (vf)_mm512_cvtepi32_ps(total) * (-128.0f * own_unit);
      else
        centres *= own_unit;
      store(sums, load<vf>(sums) * factor[r] + centres);
    }
  }
}

// acc[r] = acc[r] * alpha[r] + sum over the tile, for V vectors of dims from `dim` on that share weights p.
template <int R, int V, int Bits>
KVR_KERNEL void coded_values(const CodedItem& at, const CodedTile& tile, const CodedTile& next, int64_t tokens,
                             int64_t dim, const TileWeights& weights, float* acc) {
  Words high[R][V], low[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) high[r][v] = low[r][v] = _mm512_setzero_si512();
#pragma GCC unroll 1
  for (int c = 0; c * kChunk < tokens; ++c) {
    const char *row = tile.v[c] + 4 * dim, *ahead = next.v[c] + 4 * dim;
    const int32_t* p = weights.p + 4 * c;
    Words x[V], upper[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) upper[r] = four_words(p + r * 2 * kLanes);
    const auto step = [&](auto index) __attribute__((always_inline)) {
      constexpr int j = decltype(index)::value;
      if constexpr (Bits == 8 || j % 2 == 0) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          x[v] = _mm512_loadu_si512(row + 64 * v);
          if (c > 0) prefetch(ahead + 64 * v);
        }
        row += at.v_stride, ahead += at.v_stride;
      }
      Words y[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) y[v] = codes_of<Bits, j % 2>(x[v]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Words a = word_of<j>(upper[r]), b = broadcast_word(p[(r * 2 + 1) * kLanes + j]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          high[r][v] = dot4(high[r][v], y[v], a);
          low[r][v] = dot4(low[r][v], y[v], b);
        }
      }
    };
    step(std::integral_constant<int, 0>{}), step(std::integral_constant<int, 1>{});
    step(std::integral_constant<int, 2>{}), step(std::integral_constant<int, 3>{});
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* to = acc + r * at.v_dim + dim + v * kLanes;
      const Words whole = _mm512_add_epi32(_mm512_slli_epi32(high[r][v], 8), low[r][v]);
      store(to, load<vf>(to) * weights.alpha[r] + (vf)_mm512_cvtepi32_ps(whole) * weights.unit[r]);
    }
}

template <int R, int Bits>
inline void all_coded_values(const CodedItem& at, const CodedTile& tile, const CodedTile& next, int64_t tokens,
                             const TileWeights& weights, float* acc) {
  constexpr int V = Bits == 4 && kIntegerVecs<R> > 2 ? 2 : kIntegerVecs<R>;
  int64_t d = 0;
  for (; d + V * kLanes <= at.v_dim; d += V * kLanes) {
    const int64_t g = Bits == 4 ? d / kGroup : 0;
    const TileWeights own{weights.p + g * R * 2 * kLanes, weights.unit + g * R, weights.alpha};
    coded_values<R, V, Bits>(at, tile, next, tokens, d, own, acc);
  }
  for (; d < at.v_dim; d += kLanes) coded_values<R, 1, Bits>(at, tile, next, tokens, d, weights, acc);
}

}  // namespace kvreclaim::KVR_NS
