// Decode attention over fp8 caches by products of pairs of bf16, for CPUs that have them: a number of E4M3 is one of
// bf16, and the scales of a token join its scores and its weight. Weights are two bf16 numbers each, 16 bits.
#pragma once

#include "kvreclaim/decode.h"
#include "kvreclaim/item.h"

namespace kvreclaim::KVR_NS {

#if defined(__AVX512BF16__)

// Where a tile's four chunks lie.
struct Fp8Tile {
  const char *k[kChunks], *v[kChunks], *p[kChunks];
};

inline void open_fp8(const AttentionArgs& a, const Item& item, int64_t at, Fp8Tile& tile) {
  const CacheView& c = a.cache;
  for (int i = 0; i < kChunks; ++i) {
    const int64_t slot = smaller(at + i * kChunk, (item.high - 1) / kChunk * kChunk), offset = slot % c.block_size;
    const char* own = unit(c, a.layer, item.seq.block_ids[slot / c.block_size], item.head);
    tile.k[i] = own + 4 * offset;
    tile.v[i] = own + v_codes(c) + offset * c.v_dim;
    tile.p[i] = own + params(c) + offset;
  }
}

// Bytes 2 Half and 2 Half + 1 of each word, in the upper bytes of its two 16-bit halves.
template <int Half>
KVR_INLINE __m512i fp8_bytes(__m512i words) {
  return _mm512_shuffle_epi8(words, _mm512_broadcast_i32x4(
      Half == 0 ? _mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13)
                : _mm_setr_epi8(-1, 2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15)));
}

// The bf16 numbers that those bytes are, where each has a leading bit.
KVR_INLINE __m512i fp8_normal(__m512i bytes) {
  const __m512i fields = _mm512_and_si512(_mm512_srai_epi16(bytes, 4), _mm512_set1_epi16((short)0x87f0));
  return _mm512_add_epi16(fields, _mm512_set1_epi16((127 - 7) << 7));
}

// The same for all bytes.
inline __m512i fp8_any(__m512i bytes) {
  alignas(64) static constexpr uint16_t kSmall[32] = {0, 15104, 15232, 15296, 15360, 15392, 15424, 15456};  // n 2^-9
  const __mmask32 is_small = _mm512_testn_epi16_mask(bytes, _mm512_set1_epi16(0x7800));
  const __m512i size = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 8), _mm512_load_si512(kSmall));
  const __m512i sign = _mm512_and_si512(bytes, _mm512_set1_epi16((short)0x8000));
  return _mm512_mask_mov_epi16(fp8_normal(bytes), is_small, _mm512_or_si512(size, sign));
}

struct Fp8Pairs {
  __m512bh low, high;  // bytes 0 and 1, 2 and 3 of each word
};

// Words of four numbers as pairs of bf16. Few words have one without a leading bit: less than 2^-14 of the largest.
KVR_INLINE Fp8Pairs fp8_pairs(__m512i words) {
  const __m512i low = fp8_bytes<0>(words), high = fp8_bytes<1>(words);
  if (__builtin_expect(_mm512_testn_epi8_mask(words, _mm512_set1_epi8(0x78)) != 0, 0))
    return {(__m512bh)fp8_any(low), (__m512bh)fp8_any(high)};
  return {(__m512bh)fp8_normal(low), (__m512bh)fp8_normal(high)};
}

// s[r * kTile + t] = q . n(t) for R rows; q is [D / 2][R] pairs. The next tile's keys are fetched meanwhile.
template <int R>
KVR_KERNEL void fp8_scores(const uint32_t* q, const Fp8Tile& tile, const Fp8Tile& next, int64_t words, int64_t stride,
                           float* s) {
  constexpr int T = kTokenVecs<R>;
  for (int first = 0; first < kChunks; first += T) {
    __m512 acc[R][T];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) acc[r][t] = _mm512_setzero_ps();
    const uint32_t* row = q;
    for (int64_t w = 0, at = 0; w < words; ++w, at += stride, row += 2 * R) {
      Fp8Pairs x[T];
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        x[t] = fp8_pairs(_mm512_loadu_si512(tile.k[first + t] + at));
        prefetch_near(next.k[first + t] + at);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512bh a = (__m512bh)_mm512_set1_epi32((int)row[r]), b = (__m512bh)_mm512_set1_epi32((int)row[R + r]);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) acc[r][t] = pairs(pairs(acc[r][t], x[t].low, a), x[t].high, b);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) _mm512_storeu_ps(s + r * kTile + (first + t) * kChunk, acc[r][t]);
  }
}

// Weights times scales of R rows as pairs of tokens: [R][2][kTile / 2] words, high parts and then low ones.
template <int R>
KVR_INLINE void fp8_weights(const float* p, const vf* scales, uint32_t* to) {
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < kChunks; ++c) {
      const __m512 x = (__m512)(load<vf>(p + r * kTile + c * kChunk) * scales[c]);
      const __m256i high = (__m256i)_mm512_cvtneps_pbh(x);
      const __m512 rest = _mm512_sub_ps(x, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
      uint32_t* at = to + r * kTile + c * kChunk / 2;
      _mm256_storeu_si256((__m256i*)at, high);
      _mm256_storeu_si256((__m256i*)(at + kTile / 2), (__m256i)_mm512_cvtneps_pbh(rest));
    }
}

// acc[r] = acc[r] * alpha[r] + sum over the tile, for V vectors of dims from `dim` on.
template <int R, int V>
KVR_KERNEL void fp8_values(const Fp8Tile& tile, const Fp8Tile& next, int64_t tokens, int64_t v_dim, int64_t dim,
                           const uint32_t* p, const float* alpha, float* acc) {
  __m512 sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = (__m512)(load<vf>(acc + r * v_dim + dim + v * kLanes) * alpha[r]);
  for (int64_t word = 0; word * 4 < tokens; ++word) {
    const int64_t at = word % 4 * 4 * v_dim + 4 * dim;
    const char *from = tile.v[word / 4] + at, *ahead = next.v[word / 4] + at;
    Fp8Pairs x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      x[v] = fp8_pairs(_mm512_loadu_si512(from + 64 * v));
      prefetch_near(ahead + 64 * v);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part) {
        const uint32_t* own = p + r * kTile + part * (kTile / 2) + 2 * word;
        const __m512bh a = (__m512bh)_mm512_set1_epi32((int)own[0]), b = (__m512bh)_mm512_set1_epi32((int)own[1]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[r][v] = pairs(pairs(sum[r][v], x[v].low, a), x[v].high, b);
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(acc + r * v_dim + dim + v * kLanes, sum[r][v]);
}

template <int R>
inline void fp8_rows(const AttentionArgs& a, const Item& item, int64_t at, const Fp8Tile& tile, const Fp8Tile& next,
                     const TileMask& mask, RowGroup& group, float* scores) {
  const CacheView& c = a.cache;
  const int64_t tokens = smaller(kTile, smaller(item.high, group.end[R - 1]) - at);
  if (tokens <= 0) return;
  fp8_scores<R>(reinterpret_cast<const uint32_t*>(group.q), tile, next, k_words(c), k_word_stride(c), scores);
  vf scales[kChunks];
  for (int i = 0; i < kChunks; ++i) {
    const char* own = tile.p[i] - params(c);  // as if the chunk were its unit's first
    const vf scale = fine_scales(c, own, 0, 0) * query_scale(a);
    scales[i] = fine_scales(c, own, 0, 1);
    for (int r = 0; r < R; ++r) {
      float* s = scores + r * kTile + i * kChunk;
      store(s, load<vf>(s) * scale);
    }
  }
  finish_scores<R>(a, item, group, at, mask, scores);
  float alpha[kMaxR];
  softmax_rows<R>(scores, group, alpha);
  alignas(64) uint32_t p[R * kTile];
  fp8_weights<R>(scores, scales, p);
  constexpr int V = kTokenVecs<R>;
  int64_t d = 0;
  for (; d + V * kLanes <= c.v_dim; d += V * kLanes)
    fp8_values<R, V>(tile, next, tokens, c.v_dim, d, p, alpha, group.acc);
  for (; d < c.v_dim; d += kLanes) fp8_values<R, 1>(tile, next, tokens, c.v_dim, d, p, alpha, group.acc);
}

// Heads item.head .. item.head + run of an item, tile by tile; leaves their sums in `heads`.
inline void run_fp8(const AttentionArgs& a, const Item& item, int64_t run, HeadRows* heads) {
  alignas(64) float scores[kMaxR * kTile];
  const int64_t floats = group_floats(a.cache, item.rows);
  float* memory = thread_scratch(run * floats);
  for (int64_t h = 0; h < run; ++h) open_groups(a, of_head(item, h), memory + h * floats, heads[h]);
  for (int64_t at = first_tile(a, item); at < item.high; at += kTile)
    for (int64_t h = 0; h < run; ++h) {
      const Item mine = of_head(item, h);
      Fp8Tile tile, next;
      TileMask mask;
      open_mask(a, mine, at, mask);
      open_fp8(a, mine, at, tile);
      open_fp8(a, mine, smaller(at + kTile, item.high - 1), next);
      for (int g = 0; g < heads[h].count; ++g) {
        RowGroup& group = heads[h].groups[g];
        const Fp8Tile& ahead = g + 1 < heads[h].count ? tile : next;
        switch (group.count) {
          case 1: fp8_rows<1>(a, mine, at, tile, ahead, mask, group, scores); break;
          case 2: fp8_rows<2>(a, mine, at, tile, ahead, mask, group, scores); break;
          case 3: fp8_rows<3>(a, mine, at, tile, ahead, mask, group, scores); break;
          case 4: fp8_rows<4>(a, mine, at, tile, ahead, mask, group, scores); break;
          default: fp8_rows<kMaxR>(a, mine, at, tile, ahead, mask, group, scores);
        }
      }
    }
}

#else

inline void run_fp8(const AttentionArgs&, const Item&, int64_t, HeadRows*) {}

#endif

}  // namespace kvreclaim::KVR_NS
