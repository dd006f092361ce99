// The three inner loops of decode attention over codes of 8 and 4 bits by integer products (integer.h), for CPUs
// that multiply bytes (AVX-512 VNNI): scores, weights, weighted values of one tile.
//
// vpdpbusd sums four products of an unsigned by a signed byte, which are a word's codes and a word of q or p. q
// and the softmax's weights are 16-bit integers, 256 * high + low, whose high and low bytes are multiplied
// apart: as many instructions as 16-bit products, but codes need no unpacking (int8) or one mask (4 bits). So
// nothing is rounded to 8 bits: what is lost is 2^-16 of the largest |q| and of a tile's largest weight. Codes of
// two bytes (turboquant4's levels) are looked up and multiplied byte by byte, too.
//
//   keys    score = scale(t) q . (n + centre(t))      per group of dims that share a scale
//   values  sum_t p(t) scale(t) (n + centre(t))       p(t) scale(t) in units of a bound of it over the tile;
//                                                     centres are summed apart, in fp32
// with n the stored code.
#pragma once

#if defined(__AVX512VNNI__)
#include <type_traits>

#include "kvreclaim/integer_codes.h"

namespace kvreclaim::KVR_NS {

// Vectors of tokens, or of dims, that share a byte broadcast: with R rows, high and low, 16 accumulators; 12 of
// codes of two bytes.
template <int R, Format F>
constexpr int kIntegerVecs = has_two_bytes(F) ? (R <= 2 ? 2 : 1) : R <= 2 ? 4 : R <= 4 ? 2 : 1;

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

// What a vector of codes becomes before it is multiplied, and its products with bytes of 16-bit integers.
template <Format F>
struct Digits {
  Words high, low;  // of one byte: low alone
};

template <Format F>
KVR_INLINE Digits<F> digits_of(Words codes) {
  if constexpr (has_two_bytes(F)) return {look_up(kLevelBytes.high, codes), look_up(kLevelBytes.low, codes)};
  return {codes, codes};
}

template <Format F>
struct DigitSums {
  Words high = _mm512_setzero_si512(), low = _mm512_setzero_si512(), middle = _mm512_setzero_si512();

  // a, b: words of high and of low bytes.
  KVR_INLINE void add(const Digits<F>& x, Words a, Words b) {
    if constexpr (has_two_bytes(F)) {
      high = dot4(high, x.high, a);
      middle = dot4(dot4(middle, x.high, b), x.low, a);
      low = dot4(low, x.low, b);
    } else {
      high = dot4(high, x.low, a);
      low = dot4(low, x.low, b);
    }
  }

  // The whole sum, and `bias` of what is subtracted from every code.
  KVR_INLINE vf total(float bias) const {
    const Words rest = _mm512_add_epi32(_mm512_slli_epi32(has_two_bytes(F) ? middle : high, 8), low);
    if constexpr (!has_two_bytes(F)) return (vf)_mm512_cvtepi32_ps(rest);
    return ((vf)_mm512_cvtepi32_ps(high) * 65536.0f + bias) + (vf)_mm512_cvtepi32_ps(rest);
  }
};

// A group's rows: q as bytes, and what belongs to them.
struct IntegerRows {
  int32_t* q;                                // [R][2][kPlane]: high bytes, low bytes
  float* offsets;                            // [groups][R][kLanes]: of the values' centres
  float not_finite[kMaxR];                   // NaN of a row that is not finite, else 0
  float unit[kMaxR];                         // of a score: q's unit, and that of the scales
  int32_t bias[kMaxR];                       // int8: -128 sum of q
  float q_sums[kMaxIntegerGroups * kMaxR];   // 4 bits: [group][R] sums of q
};

// Sums of R rows and T chunks' tokens over `words` word rows from byte `from` of each of them on.
template <int R, int T, Format F>
KVR_INLINE void add_words(const int32_t* q, int64_t words, int64_t stride, const char* const* base,
                          const char* const* ahead, int64_t from, DigitSums<F> (&sums)[R][T]) {
  constexpr bool is_wide = bits_of(F) == 8;
#pragma GCC unroll 1
  for (int64_t w = 0; w < words; w += is_wide ? 4 : 2, q += 4) {
    Words x[T], upper[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) upper[r] = four_words(q + r * 2 * kPlane);
    const auto step = [&](auto index) __attribute__((always_inline)) {
      constexpr int j = decltype(index)::value;
      if constexpr (is_wide || j % 2 == 0) {
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          x[t] = _mm512_loadu_si512(base[t] + from);
          prefetch_near(ahead[t] + from);
        }
        from += stride;
      }
      Digits<F> y[T];
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) y[t] = digits_of<F>(codes_of<F, j % 2>(x[t]));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Words a = word_of<j>(upper[r]), b = broadcast_word(q[(r * 2 + 1) * kPlane + j]);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) sums[r][t].add(y[t], a, b);
      }
    };
    step(std::integral_constant<int, 0>{}), step(std::integral_constant<int, 1>{});
    step(std::integral_constant<int, 2>{}), step(std::integral_constant<int, 3>{});
  }
}

// to[r * kTile + t] = scores of R rows and a chunk's tokens, of the sums over the dims of group g.
template <int R, int T, Format F>
KVR_INLINE void close_scores(const CodedItem& at, const IntegerRows& rows, const char* planes, int64_t g, int t,
                             const DigitSums<F> (&sums)[R][T], const ScaleTables& tables, float* to) {
  GroupParams group{};
  if constexpr (has_groups(F))
    group = int4_params(planes + 2 * g * at.plane, at.plane, tables);
  else
    group.scale = fine_scale<F, 0>(planes, planes + at.high, tables);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r, to += kTile) {
    if constexpr (F == Format::kInt8) {
      const Words whole = _mm512_add_epi32(_mm512_slli_epi32(sums[r][t].high, 8), sums[r][t].low);
      store(to, group.scale * (vf)_mm512_cvtepi32_ps(_mm512_add_epi32(whole, broadcast_word(rows.bias[r]))));
    } else if constexpr (has_two_bytes(F)) {
      store(to, group.scale * sums[r][t].total(-(float)kLevelOffset * rows.q_sums[r]));
    } else {
      vf sum = group.scale * (sums[r][t].total(0) + group.first * rows.q_sums[g * R + r]);
      if (g > 0) sum += load<vf>(to);
      store(to, sum);
    }
  }
}

// s[r * kTile + t] = score of R rows and all tokens of the tile in units of rows.unit. Meanwhile most of the
// next tile's keys are fetched; fetching is spread over all loops of a tile, memory being slower than any.
template <int R, Format F>
KVR_KERNEL void coded_scores(const CodedItem& at, const IntegerRows& rows, const CodedTile& tile,
                             const CodedTile& next, float* s) {
  constexpr int T = kIntegerVecs<R, F>;
  const int64_t words = has_groups(F) ? kGroup / 8 : at.k_words;  // of a group
  const ScaleTables tables = scale_tables<F>();
  for (int first = 0; first < kChunks; first += T) {
    const char* ahead[T];  // coded_weights fetches the last chunk's
    for (int t = 0; t < T; ++t) ahead[t] = (first + t < kChunks - 1 ? next : tile).k[first + t];
    for (int64_t g = 0; g < at.k_groups; ++g) {
      DigitSums<F> sums[R][T];
      add_words<R, T, F>(rows.q + g * words * 2, words, at.k_stride, tile.k + first, ahead,
                         g * words * at.k_stride, sums);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t)
        close_scores<R, T, F>(at, rows, tile.p[first + t], g, t, sums, tables, s + (first + t) * kLanes);
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

// Slots of a tile that a group's rows see, a bit each.
struct SeenSlots {
  bool is_same;  // by all rows
  uint64_t any;  // by one of them
  uint64_t by[kMaxR];
};

// What a tile's softmax leaves for its values.
struct TileWeights {
  int32_t* p;           // [groups][R][2][kLanes]: high bytes, low bytes; of chunks' words, see weight_word
  float *unit, *alpha;  // [groups][R] of p; [R] of what was summed before
};

// Where word j of chunk c's weights lies among a tile's sixteen: as integer_weights packs them.
constexpr int weight_word(int c) { return 8 * (c % 2) + 2 * (c / 2); }
constexpr int word_step(int j) { return 4 * (j / 2) + j % 2; }

// The 16-bit words of two chunks' tokens in the order in which values multiply them.
template <Format F>
struct WeightOrder {
  alignas(64) uint16_t at[32] = {};

  constexpr WeightOrder() {
    for (int i = 0; i < 32; ++i) {
      const int word = i / 4 % 4, k = i % 4;
      const int token = bits_of(F) == 4 ? word / 2 * 8 + word % 2 + 2 * k : word * 4 + k;
      at[i] = (uint16_t)(i / 16 * 32 + 2 * token);
    }
  }
};
template <Format F>
constexpr WeightOrder<F> kWeightOrder{};

// Weights times scales of a tile's tokens as 16-bit integers, high bytes and then low ones, in to[2 * kLanes]. Returns
// what centres add to the values: sums of lanes, in units of these integers.
template <Format F>
KVR_INLINE vf integer_weights(const vf (&weights)[kChunks], const GroupParams (&own)[kChunks], int32_t* to) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: the low 16 bits of a sum with it are the rounded number
  vf x[kChunks], centres{};
#pragma GCC unroll 4
  for (int c = 0; c < kChunks; ++c) {
    x[c] = weights[c] * own[c].scale + magic;
    const vf whole = x[c] - magic;
    if constexpr (has_groups(F))  // of the rounded weight, as its codes are: what rounding adds is as small as the number
      centres += whole * own[c].first;
    else
      centres += whole;
  }
  const Words order = _mm512_load_si512(kWeightOrder<F>.at);
  const Words a = _mm512_permutex2var_epi16((Words)x[0], order, (Words)x[1]);
  const Words b = _mm512_permutex2var_epi16((Words)x[2], order, (Words)x[3]);
  const Words half = _mm512_set1_epi16(128), byte = _mm512_set1_epi16(255);
  _mm512_storeu_si512(to, _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(a, half), 8),
                                             _mm512_srai_epi16(_mm512_add_epi16(b, half), 8)));
  _mm512_storeu_si512(to + kLanes, _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte)));
  if constexpr (has_groups(F)) return centres;
  return centres * code_offset(F);
}

// The greatest of each of R rows' scores of a tile.
template <int R>
KVR_INLINE Vec<kMaxR>::F row_tops(const float* s) {
  __m512 top[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    vf most = load<vf>(s + r * kTile);
#pragma GCC unroll 4
    for (int t = kLanes; t < kTile; t += kLanes) most = vmax(most, load<vf>(s + r * kTile + t));
    top[r] = (__m512)most;
  }
  const auto of_four = [&](int first) __attribute__((always_inline)) {  // rows in the lanes of a quarter
    const __m512 a = top[first], b = top[smaller(first + 1, R - 1)], c = top[smaller(first + 2, R - 1)];
    const __m512 d = top[smaller(first + 3, R - 1)];
    const __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  };
  return (Vec<kMaxR>::F)_mm256_set_m128(of_four(R > 4 ? 4 : 0), of_four(0));
}

// Scores -> weights 2^(s - m) times the values' scales, as 16-bit integers in bytes, against the tile's own
// maximum: against the row's, thousands of small ones would round to nothing. A row that sees no slot of the tile is
// left as it was.
template <int R, Format F>
KVR_KERNEL void coded_weights(const CodedItem& at, const CodedTile& tile, const CodedTile& next, const SeenSlots& seen,
                              const float* s, const float* unit, float* offsets, RowGroup& group,
                              const TileWeights& to) {
  using M = Vec<kMaxR>::F;
  const int64_t lines = at.v_row_bytes / 4;  // of a chunk's values
  M best = row_tops<R>(s), units{};
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) units[r] = unit[r];
  const M none = splat<M>(kNegInf);
  const M tops = select(best == none, M{}, best);  // taken off before scaling: never rounded apart, no weight is above 1
  best *= units;
  const M m = vmax(group.m, best), base = select(m == none, M{}, m);
  const M factor = exp2v(group.m - base), share = exp2v(best - base);
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
    for (int64_t line = r; line < at.k_words; line += R) prefetch_near(next.k[kChunks - 1] + line * at.k_stride);
    for (int64_t line = r; line < lines; line += R) prefetch_near(next.v[0] + line * 64);
  }
  const ScaleTables tables = scale_tables<F>();
  for (int64_t g = 0; g < at.v_groups; ++g) {
    GroupParams stored[kChunks], own[kChunks];
#pragma GCC unroll 4
    for (int c = 0; c < kChunks; ++c) {
      stored[c] = value_params<F>(at, tile, c, g, tables);
      prefetch_near(next.p[c] + 64 * g);
    }
    int bound = 0;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      if (r == 0 || !seen.is_same) {
        bound = scale_bound<F>(at, tile, g, seen.by[r] == 0 ? seen.any : seen.by[r]);
        const vf inverse = splat(kLargestInt16 * power_of_two(-bound));
#pragma GCC unroll 4
        for (int c = 0; c < kChunks; ++c) own[c] = {stored[c].scale * inverse, stored[c].first};
      }
      const float unit_of_p = share[r] * power_of_two(bound) * (code_unit(F) / kLargestInt16);
      to.unit[g * R + r] = unit_of_p;
      float* sums = offsets + (g * R + r) * kLanes;
      const vf centres = integer_weights<F>(weights[r], own, to.p + (g * R + r) * 2 * kLanes);
      store(sums, load<vf>(sums) * factor[r] + centres * unit_of_p);
    }
  }
}

// acc[r] = acc[r] * alpha[r] + sum over the tile, for V vectors of dims from `dim` on that share weights p.
template <int R, int V, Format F>
KVR_KERNEL void coded_values(const CodedItem& at, const CodedTile& tile, const CodedTile& next, int64_t tokens,
                             int64_t dim, const TileWeights& weights, float* acc) {
  constexpr bool is_wide = bits_of(F) == 8;
  DigitSums<F> sums[R][V];
#pragma GCC unroll 1
  for (int c = 0; c * kChunk < tokens; ++c) {
    const char *row = tile.v[c] + 4 * dim, *ahead = next.v[c] + 4 * dim;
    const int32_t* p = weights.p + weight_word(c);
    Words x[V];
    const auto step = [&](auto index) __attribute__((always_inline)) {
      constexpr int j = decltype(index)::value;
      if constexpr (is_wide || j % 2 == 0) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          x[v] = _mm512_loadu_si512(row + 64 * v);
          if (c > 0) prefetch_near(ahead + 64 * v);
        }
        row += at.v_stride, ahead += at.v_stride;
      }
      Digits<F> y[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) y[v] = digits_of<F>(codes_of<F, j % 2>(x[v]));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const int32_t* own = p + r * 2 * kLanes + word_step(j);
        const Words a = broadcast_word(own[0]), b = broadcast_word(own[kLanes]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[r][v].add(y[v], a, b);
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
      store(to, load<vf>(to) * weights.alpha[r] + sums[r][v].total(0) * weights.unit[r]);
    }
}

template <int R, Format F>
inline void all_coded_values(const CodedItem& at, const CodedTile& tile, const CodedTile& next, int64_t tokens,
                             const TileWeights& weights, float* acc) {
  constexpr int V = has_groups(F) && kIntegerVecs<R, F> > 2 ? 2 : kIntegerVecs<R, F>;  // of one group
  const auto of_group = [&](int64_t d) -> TileWeights {
    const int64_t g = has_groups(F) ? d / kGroup : 0;
    return {weights.p + g * R * 2 * kLanes, weights.unit + g * R, weights.alpha};
  };
  int64_t d = 0;
  for (; d + V * kLanes <= at.v_dim; d += V * kLanes) coded_values<R, V, F>(at, tile, next, tokens, d, of_group(d), acc);
  for (; d < at.v_dim; d += kLanes) coded_values<R, 1, F>(at, tile, next, tokens, d, of_group(d), acc);
}

}  // namespace kvreclaim::KVR_NS
#endif
