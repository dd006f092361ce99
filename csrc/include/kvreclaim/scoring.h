// TriAttention's two products in one pass over the keys.
//
//   out[h, t] = max_r queries[h, r] . K[t] + sum_f weights[h, f] |K_f[t]|
//
// Lanes are tokens: every load of keys serves all query heads of the KV head, no sum runs across lanes.
// Oracle: ops/scoring.py::trig_norm_scores; arXiv 2604.04921.
#pragma once

#include <cstdint>

#include "kvreclaim/tokens.h"

namespace kvreclaim {

struct TrigArgs {
  TokensView tokens;
  const float* queries;  // [H, R, D], turned; R may be 0
  const float* weights;  // [H, F], or null for no norm term
  int64_t query_heads;   // H, a multiple of K
  int64_t rows;          // R
  int64_t start, bands;  // RopeLayout: first rotated dim, F
  bool interleaved;      // band f is dims 2f, 2f + 1 from start, else f, f + F
  float* out;            // [H, T]
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include "kvreclaim/memory.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS {

// How the dims of a key are read. kPairsHalf, kPairsInterleaved: 16-bit words that hold two dims of two
// bands, or both dims of one; kDims*: dim by dim, for fp32 and for bands that begin within a word.
enum class BandLoad { kPairsHalf, kPairsInterleaved, kDimsF32, kDimsBF16 };

constexpr int kTrigVectors = 2;      // token vectors of a tile, which share the broadcasts
constexpr int64_t kTrigTile = (int64_t)kTrigVectors * kLanes;
constexpr int64_t kTrigPanel = kTrigTile < 16 ? 16 : kTrigTile;  // decoded tokens
constexpr int kTrigRows = 4;         // query rows at once; more read the tile again, from the first cache
constexpr int64_t kTrigChunk = 256;  // tokens of a work item, at least

struct TrigTile {
  const char* keys[kTrigVectors];
  const char* next[kTrigVectors];  // the tile after it, fetched meanwhile
  int64_t stride;                  // bytes between word rows
  int64_t dim, start, bands;
  bool interleaved;
};

struct TrigSums {
  vf at[kTrigRows][kTrigVectors];
};

// One dim, or one word row, of every vector of the tile.
struct TrigVectors {
  vf at[kTrigVectors];
};
struct TrigWords {
  vu at[kTrigVectors];
};

KVR_INLINE TrigWords load_words(const TrigTile& t, int64_t at) {
  TrigWords words;
#pragma GCC unroll 4
  for (int v = 0; v < kTrigVectors; ++v) {
    prefetch(t.next[v] + at);
    words.at[v] = load<vu>(t.keys[v] + at);
  }
  return words;
}

KVR_INLINE TrigVectors even(const TrigWords& words) {
  TrigVectors x;
#pragma GCC unroll 4
  for (int v = 0; v < kTrigVectors; ++v) x.at[v] = even(words.at[v]);
  return x;
}

KVR_INLINE TrigVectors odd(const TrigWords& words) {
  TrigVectors x;
#pragma GCC unroll 4
  for (int v = 0; v < kTrigVectors; ++v) x.at[v] = odd(words.at[v]);
  return x;
}

template <BandLoad kLoad>
KVR_INLINE TrigVectors load_dim(const TrigTile& t, int64_t dim) {
  if constexpr (kLoad == BandLoad::kDimsF32) {
    const TrigWords words = load_words(t, dim * t.stride);
    TrigVectors x;
#pragma GCC unroll 4
    for (int v = 0; v < kTrigVectors; ++v) x.at[v] = (vf)words.at[v];
    return x;
  }
  const TrigWords words = load_words(t, (dim >> 1) * t.stride);
  return dim & 1 ? odd(words) : even(words);
}

// Coefficients of some query rows in the order in which the tile reads them: for each band x, y and half the
// weight (see twice_sqrt) of every row, then for each dim outside the bands one of every row. Returns the end.
inline float* trig_pack(float* to, const TrigTile& t, int rows, const float* q, const float* w) {
  const int64_t step = t.interleaved ? 2 : 1, apart = t.interleaved ? 1 : t.bands;
  for (int64_t f = 0; f < t.bands; ++f) {
    const int64_t d = t.start + f * step;
    for (int r = 0; q != nullptr && r < rows; ++r) *to++ = q[r * t.dim + d];
    for (int r = 0; q != nullptr && r < rows; ++r) *to++ = q[r * t.dim + d + apart];
    for (int r = 0; w != nullptr && r < rows; ++r) *to++ = w[r * t.bands + f] * 0.5f;
  }
  for (int64_t d = 0; q != nullptr && d < t.dim; ++d)
    for (int r = 0; r < rows && (d < t.start || d >= t.start + 2 * t.bands); ++r) *to++ = q[r * t.dim + d];
  return to;
}

template <int kRows>
struct TrigAcc {
  vf at[kRows][kTrigVectors];

  // at[r] += c[r] x
  KVR_INLINE void add(const TrigVectors& x, const float* c) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kTrigVectors; ++v) at[r][v] += x.at[v] * c[r];
  }
};

// One band: coefficients as in trig_pack.
template <int kRows, bool kProduct, bool kNorm>
KVR_INLINE void trig_band(TrigAcc<kRows>& acc, const TrigVectors& x, const TrigVectors& y, const float* c) {
  if constexpr (kProduct) {
    acc.add(x, c);
    acc.add(y, c + kRows);
  }
  if constexpr (kNorm) {
    TrigVectors norm;
#pragma GCC unroll 4
    for (int v = 0; v < kTrigVectors; ++v)
      norm.at[v] = twice_sqrt(x.at[v] * x.at[v] + (y.at[v] * y.at[v] + kTinySquare));
    acc.add(norm, c + (kProduct ? 2 * kRows : 0));
  }
}

// The tile's sums of products (kProduct) and of weighted band norms (kNorm) for kRows rows.
template <BandLoad kLoad, int kRows, bool kProduct, bool kNorm>
__attribute__((noinline)) void trig_tile(const TrigTile& tile, const float* c, TrigSums& out) {
  constexpr bool kPairs = kLoad == BandLoad::kPairsHalf || kLoad == BandLoad::kPairsInterleaved;
  constexpr int kCoefficients = kRows * (2 * kProduct + kNorm);  // of a band
  const TrigTile t = tile;
  const int64_t bands = t.bands, stride = t.stride;
  TrigAcc<kRows> acc;
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kTrigVectors; ++v) acc.at[r][v] = vf{};

  if constexpr (kLoad == BandLoad::kPairsHalf) {
    const int64_t apart = bands / 2 * stride;
    int64_t at = t.start / 2 * stride;
    for (int64_t f = 0; f < bands; f += 2, at += stride, c += 2 * kCoefficients) {
      const TrigWords real = load_words(t, at), imag = load_words(t, at + apart);
      trig_band<kRows, kProduct, kNorm>(acc, even(real), even(imag), c);
      trig_band<kRows, kProduct, kNorm>(acc, odd(real), odd(imag), c + kCoefficients);
    }
  } else if constexpr (kLoad == BandLoad::kPairsInterleaved) {
    int64_t at = t.start / 2 * stride;
    for (int64_t f = 0; f < bands; ++f, at += stride, c += kCoefficients) {
      const TrigWords words = load_words(t, at);
      trig_band<kRows, kProduct, kNorm>(acc, even(words), odd(words), c);
    }
  } else {
    const int64_t step = t.interleaved ? 2 : 1, apart = t.interleaved ? 1 : bands;
    for (int64_t f = 0; f < bands; ++f, c += kCoefficients) {
      const int64_t d = t.start + f * step;
      trig_band<kRows, kProduct, kNorm>(acc, load_dim<kLoad>(t, d), load_dim<kLoad>(t, d + apart), c);
    }
  }

  // The dims outside the bands: [0, start) and [start + 2 bands, dim).
  for (int part = 0; kProduct && part < 2; ++part) {
    const int64_t end = part == 0 ? t.start : t.dim;
    for (int64_t d = part == 0 ? 0 : t.start + 2 * bands; d < end;) {
      if constexpr (kPairs) {
        const TrigWords words = load_words(t, d / 2 * stride);
        acc.add(even(words), c);
        acc.add(odd(words), c + kRows);
        d += 2, c += 2 * kRows;
      } else {
        acc.add(load_dim<kLoad>(t, d), c);
        d += 1, c += kRows;
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kTrigVectors; ++v) out.at[r][v] = acc.at[r][v];
}

template <BandLoad kLoad, bool kProduct, bool kNorm>
KVR_INLINE void trig_rows(int rows, const TrigTile& t, const float* c, TrigSums& out) {
  switch (rows) {
    case 1: return trig_tile<kLoad, 1, kProduct, kNorm>(t, c, out);
    case 2: return trig_tile<kLoad, 2, kProduct, kNorm>(t, c, out);
    case 3: return trig_tile<kLoad, 3, kProduct, kNorm>(t, c, out);
    default: return trig_tile<kLoad, 4, kProduct, kNorm>(t, c, out);
  }
}

// Rows of the next pass, of `left` that remain: 7 go as 4 + 3, 5 as 3 + 2.
KVR_INLINE int trig_step(int64_t left) { return (int)ceil_div(left, ceil_div(left, kTrigRows)); }

// out[head, t ...] = sums (or +=), cut off at the last token.
KVR_INLINE void trig_store(const TrigArgs& a, int64_t head, int64_t t, const vf* sums, bool add) {
  float* out = a.out + head * a.tokens.num_tokens + t;
  for (int v = 0; v < kTrigVectors; ++v, out += kLanes) {
    const int64_t left = a.tokens.num_tokens - t - (int64_t)v * kLanes;
    if (left <= 0) return;
    vf sum = sums[v];
    if (add) {
      vf old{};
      __builtin_memcpy(&old, out, 4 * (size_t)(left < kLanes ? left : kLanes));
      sum += old;
    }
    store_tokens(out, sum, left);
  }
}

// The heads of one KV head over tokens [begin, end), one term or both fused: kProduct needs R = 1.
template <BandLoad kLoad, bool kProduct, bool kNorm>
void trig_heads(const TrigArgs& a, const TrigTile& tile, const float* packed, int64_t kv_head, int64_t t) {
  const int64_t heads = a.query_heads / a.tokens.cache.heads;
  for (int64_t g = 0; g < heads;) {
    const int rows = trig_step(heads - g);
    TrigSums sums;
    trig_rows<kLoad, kProduct, kNorm>(rows, tile, packed, sums);
    for (int r = 0; r < rows; ++r) trig_store(a, kv_head * heads + g + r, t, sums.at[r], false);
    packed += rows * ((kProduct ? tile.dim : 0) + (kNorm ? tile.bands : 0));
    g += rows;
  }
}

// The maximum over R products per head, added to what is there (or stored, if nothing is).
template <BandLoad kLoad>
void trig_maxima(const TrigArgs& a, const TrigTile& tile, const float* packed, int64_t kv_head, int64_t t,
                 bool add) {
  const int64_t heads = a.query_heads / a.tokens.cache.heads;
  for (int64_t head = kv_head * heads; head < (kv_head + 1) * heads; ++head) {
    vf best[kTrigVectors] = {};
    for (int64_t r = 0; r < a.rows;) {
      const int rows = trig_step(a.rows - r);
      TrigSums sums;
      trig_rows<kLoad, true, false>(rows, tile, packed, sums);
      for (int i = 0; i < rows; ++i)
        for (int v = 0; v < kTrigVectors; ++v) best[v] = r + i ? vmax(best[v], sums.at[i][v]) : sums.at[i][v];
      packed += rows * tile.dim;
      r += rows;
    }
    trig_store(a, head, t, best, add);
  }
}

// Both terms' coefficients of one KV head, as trig_heads and trig_maxima walk through them.
inline float* trig_pack_head(const TrigArgs& a, const TrigTile& tile, int64_t kv_head, float* to) {
  const int64_t heads = a.query_heads / a.tokens.cache.heads, dim = tile.dim;
  const bool fused = a.rows == 1;
  for (int64_t g = 0; g < heads;) {
    const int rows = trig_step(heads - g);
    const int64_t head = kv_head * heads + g;
    const float* weights = a.weights == nullptr ? nullptr : a.weights + head * a.bands;
    to = trig_pack(to, tile, rows, fused ? a.queries + head * dim : nullptr, weights);
    g += rows;
  }
  TrigTile plain = tile;
  plain.start = plain.bands = 0;
  for (int64_t head = kv_head * heads; !fused && head < (kv_head + 1) * heads; ++head)
    for (int64_t r = 0; r < a.rows;) {
      const int rows = trig_step(a.rows - r);
      to = trig_pack(to, plain, rows, a.queries + (head * a.rows + r) * dim, nullptr);
      r += rows;
    }
  return to;
}

// The heads of one KV head over one tile; `tile.bands` is 0 where bands only belong to the norm term.
template <BandLoad kLoad>
KVR_INLINE void trig_one(const TrigArgs& a, const TrigTile& tile, const float* packed, int64_t kv_head, int64_t t) {
  constexpr BandLoad kPlain = kLoad == BandLoad::kDimsF32 ? BandLoad::kDimsF32 : BandLoad::kPairsHalf;
  const int64_t heads = a.query_heads / a.tokens.cache.heads, norms = a.weights == nullptr ? 0 : a.bands;
  if (a.rows == 1 && norms > 0) {
    trig_heads<kLoad, true, true>(a, tile, packed, kv_head, t);
  } else if (a.rows == 1) {
    trig_heads<kLoad, true, false>(a, tile, packed, kv_head, t);
  } else {  // without weights there are no bands, and the norm term stores zeros
    trig_heads<kLoad, false, true>(a, tile, packed, kv_head, t);
    TrigTile plain = tile;
    plain.start = plain.bands = 0;
    if (a.rows > 0) trig_maxima<kPlain>(a, plain, packed + heads * norms, kv_head, t, true);
  }
}

// A tile of that head without its tokens, and what trig_one reads beside it.
inline TrigTile trig_open(const TrigArgs& a, int64_t kv_head, int64_t stride, float* packed) {
  TrigTile tile{{}, {}, stride, head_dim(a.tokens.cache), a.start, a.bands, a.interleaved};
  trig_pack_head(a, tile, kv_head, packed);
  if (a.rows != 1 && a.weights == nullptr) tile.bands = 0;
  return tile;
}

inline int64_t trig_packed(const TrigArgs& a) {
  const int64_t norms = a.weights == nullptr ? 0 : a.bands;
  return a.query_heads / a.tokens.cache.heads * (a.rows * head_dim(a.tokens.cache) + norms);
}

template <BandLoad kLoad>
void trig_chunk(const TrigArgs& a, int64_t kv_head, int64_t begin, int64_t end) {
  float* packed = thread_scratch(trig_packed(a));
  TrigTile tile = trig_open(a, kv_head, k_word_stride(a.tokens.cache), packed);
  for (int64_t t = begin; t < end; t += kTrigTile) {
    for (int v = 0; v < kTrigVectors; ++v) {
      tile.keys[v] = tile_vector(a.tokens, kv_head, t, v);
      tile.next[v] = tile_vector(a.tokens, kv_head, t + kTrigTile, v);
    }
    trig_one<kLoad>(a, tile, packed, kv_head, t);
  }
}

// The same over decoded keys, in panels [dims][kTrigPanel] that stay in the first cache.
inline void trig_decoded(const TrigArgs& a, int64_t kv_head, int64_t begin, int64_t end) {
  const int64_t panel_floats = head_dim(a.tokens.cache) * kTrigPanel;
  float* panel = thread_scratch(panel_floats + trig_packed(a));
  float* packed = panel + panel_floats;
  TrigTile tile = trig_open(a, kv_head, 4 * kTrigPanel, packed);
  for (int64_t t = begin; t < end; t += kTrigPanel) {
    for (int64_t i = 0; i < kTrigPanel; i += kChunkTokens)
      plain_keys_chunk(a.tokens.cache, chunk_of(a.tokens, kv_head, t + i), panel + i, kTrigPanel);
    for (int64_t i = 0; i < kTrigPanel && t + i < end; i += kTrigTile) {
      for (int v = 0; v < kTrigVectors; ++v)
        tile.keys[v] = tile.next[v] = reinterpret_cast<const char*>(panel + i + v * kLanes);
      trig_one<BandLoad::kDimsF32>(a, tile, packed, kv_head, t + i);
    }
  }
}

inline void trig_norm_scores(const TrigArgs& a) {
  const CacheView& cache = a.tokens.cache;
  const int64_t num_tokens = a.tokens.num_tokens;
  const int64_t wanted = ceil_div(num_tokens * cache.heads, 4 * (int64_t)max_threads());
  const int64_t chunk = ceil_div(wanted < kTrigChunk ? kTrigChunk : wanted, 64) * 64;
  const int64_t chunks = ceil_div(num_tokens, chunk);
  const KeyRead read = key_read(cache);
  const bool aligned = a.start % 2 == 0 && (a.interleaved || a.bands % 2 == 0);
  parallel_for(cache.heads * chunks, [&](int64_t item) {
    const int64_t head = item / chunks, begin = item % chunks * chunk;
    const int64_t end = begin + chunk < num_tokens ? begin + chunk : num_tokens;
    if (read == KeyRead::kChunks) return trig_decoded(a, head, begin, end);
    if (read == KeyRead::kF32) return trig_chunk<BandLoad::kDimsF32>(a, head, begin, end);
    if (!aligned) return trig_chunk<BandLoad::kDimsBF16>(a, head, begin, end);
    if (a.interleaved) return trig_chunk<BandLoad::kPairsInterleaved>(a, head, begin, end);
    return trig_chunk<BandLoad::kPairsHalf>(a, head, begin, end);
  });
}

}  // namespace kvreclaim::KVR_NS
#endif
