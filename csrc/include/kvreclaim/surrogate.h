// A linear function of what a token's key and value say of themselves, in one pass over both.
//
//   out[t] = sum_f w_f ln(|K_f|^2 + e) + w_rest . k_rest + w_v . v + w_k |k| + w_l ln(|v| + e) + b,  e = 1e-6
//
// over the rotary bands K_f of a key and its other dims k_rest. Lanes are tokens; keys and values come through
// decoded chunks, which stay in the first cache. Oracle: ops/scoring.py::surrogate_features.
#pragma once

#include <cstdint>

#include "kvreclaim/tokens.h"

namespace kvreclaim {

struct SurrogateArgs {
  TokensView tokens;
  const float* weights;   // [R, F + (D - 2F) + Dv + 3] in the order of the terms above
  const int64_t* owners;  // [blocks] the row of each block's weights; or null: head h has row h, R = K
  int64_t start, bands;   // RopeLayout: first rotated dim, F
  bool interleaved;       // band f is dims 2f, 2f + 1 from start, else f, f + F
  float* out;             // [K, T]
};

// Of a row of weights.
constexpr int64_t surrogate_width(const CacheView& c, int64_t bands) { return head_dim(c) - bands + c.v_dim + 3; }

}  // namespace kvreclaim

#ifdef KVR_NS
#include "kvreclaim/memory.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS {

constexpr float kSurrogateEnergy = 1e-6f;
constexpr int64_t kSurrogateChunk = 256;  // tokens of a work item

// The terms of the keys of the vector of tokens at `keys`, a panel [D][kChunkTokens].
KVR_INLINE vf surrogate_keys(const SurrogateArgs& a, const float* keys, const float* w) {
  const int64_t dim = head_dim(a.tokens.cache), end = a.start + 2 * a.bands;
  const int64_t step = a.interleaved ? 2 : 1, apart = a.interleaved ? 1 : a.bands;
  const float* band = keys + a.start * kChunkTokens;
  vf sum{}, square{};
  for (int64_t f = 0; f < a.bands; ++f, band += step * kChunkTokens) {
    const vf x = load<vf>(band), y = load<vf>(band + apart * kChunkTokens);
    const vf power = x * x + y * y;
    square += power;
    sum += logv(power + kSurrogateEnergy) * *w++;
  }
  for (int64_t d = 0; d < dim; ++d) {
    if (d == a.start) d = end;
    if (d == dim) break;
    const vf x = load<vf>(keys + d * kChunkTokens);
    square += x * x;
    sum += x * *w++;
  }
  return sum + exact_sqrt(square) * w[a.tokens.cache.v_dim];
}

// w . v and |v|^2 of each token of a chunk, rows [kChunkTokens][Dv].
struct SurrogateValues {
  alignas(64) float product[kChunkTokens], square[kChunkTokens];

  SurrogateValues(const float* rows, int64_t dim, const float* w) {
    using V = Vec<8>::F;
    for (int i = 0; i < kChunkTokens; ++i, rows += dim) {
      V products{}, squares{};
      for (int64_t d = 0; d < dim; d += 8) {
        const V x = load<V>(rows + d);
        products += x * load<V>(w + d);
        squares += x * x;
      }
      product[i] = hsum(products), square[i] = hsum(squares);
    }
  }
};

inline void surrogate_chunk(const SurrogateArgs& a, int64_t head, int64_t t, float* keys, float* values) {
  const CacheView& cache = a.tokens.cache;
  const int64_t own_keys = head_dim(cache) - a.bands, left = a.tokens.num_tokens - t;
  const int64_t row = a.owners == nullptr ? head : a.owners[t / cache.block_size];
  const float* w = a.weights + row * surrogate_width(cache, a.bands);
  const float* last = w + own_keys + cache.v_dim;  // of |k|, of ln |v|, alone
  const ChunkAt at = chunk_of(a.tokens, head, t);
  plain_keys_chunk(cache, at, keys, kChunkTokens);
  plain_values_chunk(cache, at, kChunkTokens, values);
  const SurrogateValues found(values, cache.v_dim, w + own_keys);
  for (int v = 0; v < kChunkVectors; ++v) {
    const vf length = exact_sqrt(load<vf>(found.square + v * kLanes)) + kSurrogateEnergy;
    const vf of_values = load<vf>(found.product + v * kLanes) + logv(length) * last[1];
    const vf sum = surrogate_keys(a, keys + v * kLanes, w) + of_values + last[2];
    store_tokens(a.out + head * a.tokens.num_tokens + t + v * kLanes, sum, left - v * kLanes);
  }
}

inline void surrogate_scores(const SurrogateArgs& a) {
  const int64_t tokens = a.tokens.num_tokens, chunks = ceil_div(tokens, kSurrogateChunk);
  const CacheView& cache = a.tokens.cache;
  parallel_for(cache.heads * chunks, [&](int64_t item) {
    const int64_t begin = item % chunks * kSurrogateChunk, end = begin + kSurrogateChunk;
    float* keys = thread_scratch(kChunkTokens * (head_dim(cache) + cache.v_dim));
    float* values = keys + kChunkTokens * head_dim(cache);
    for (int64_t t = begin; t < end && t < tokens; t += kChunkTokens)
      surrogate_chunk(a, item / chunks, t, keys, values);
  });
}

}  // namespace kvreclaim::KVR_NS
#endif
