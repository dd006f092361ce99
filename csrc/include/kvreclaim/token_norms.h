// The norms of keys and values, straight from the blocks. Oracle: torch.linalg.vector_norm in fp32.
#pragma once

#include <cstdint>

#include "kvreclaim/tokens.h"

namespace kvreclaim {

struct NormArgs {
  TokensView tokens;
  bool values;  // |v| instead of |k|
  float* out;   // [K, T]
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include "kvreclaim/memory.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS {

constexpr int64_t kNormChunk = 256;  // tokens of a work item

// |k| of the vector of tokens at t.
template <KeyRead kRead>
KVR_INLINE vf key_norm_vector(const TokensView& view, int64_t head, int64_t t) {
  const char* keys = key_vector(view, head, t);
  const int64_t stride = k_word_stride(view.cache), words = k_words(view.cache);
  vf sums[4] = {};  // words is a multiple of 4: the dims are one of 8
  for (int64_t i = 0; i < words; i += 4) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const char* row = keys + (i + j) * stride;
      if constexpr (kRead == KeyRead::kF32) {
        const vf x = load<vf>(row);
        sums[j] += x * x;
      } else {
        const vu pair = load<vu>(row);
        sums[j] += even(pair) * even(pair);
        sums[j] += odd(pair) * odd(pair);
      }
    }
  }
  return exact_sqrt((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// |v| of one row of `bytes` bytes, a multiple of 16.
template <KeyRead kRead>
KVR_INLINE float value_norm(const char* row, int64_t bytes) {
  vf sum{};
  float rest = 0;
  int64_t i = 0;
  for (; i + 4 * kLanes <= bytes; i += 4 * kLanes) {
    if constexpr (kRead == KeyRead::kF32) {
      const vf x = load<vf>(row + i);
      sum += x * x;
    } else {
      const vu pair = load<vu>(row + i);
      sum += even(pair) * even(pair);
      sum += odd(pair) * odd(pair);
    }
  }
  for (; i < bytes; i += 16) {
    using Quad = Vec<4>;
    if constexpr (kRead == KeyRead::kF32) {
      const Quad::F x = load<Quad::F>(row + i);
      rest += hsum(x * x);
    } else {
      const Quad::U pair = load<Quad::U>(row + i);
      rest += hsum(even(pair) * even(pair) + odd(pair) * odd(pair));
    }
  }
  return __builtin_sqrtf(hsum(sum) + rest);
}

template <KeyRead kRead>
void norm_chunk(const NormArgs& a, int64_t head, int64_t begin, int64_t end) {
  const CacheView& cache = a.tokens.cache;
  float* out = a.out + head * a.tokens.num_tokens;
  if (!a.values) {
    for (int64_t t = begin; t < end; t += kLanes)
      store_tokens(out + t, key_norm_vector<kRead>(a.tokens, head, t), end - t);
    return;
  }
  const int64_t size = cache.block_size, bytes = cache.v_dim * size_of(cache.formats.v);
  for (int64_t t = begin; t < end; ++t) {
    const char* block = v_block(cache, a.tokens.layer, a.tokens.block_ids[t / size], head);
    out[t] = value_norm<kRead>(block + t % size * bytes, bytes);
  }
}

// The same through decoded chunks; a rotation leaves norms as they are.
inline void norm_decoded(const NormArgs& a, int64_t head, int64_t begin, int64_t end) {
  const CacheView& cache = a.tokens.cache;
  const int64_t dim = a.values ? cache.v_dim : head_dim(cache);
  float* numbers = thread_scratch(dim * kChunkTokens);
  float* out = a.out + head * a.tokens.num_tokens;
  for (int64_t t = begin; t < end; t += kChunkTokens) {
    const ChunkAt at = chunk_of(a.tokens, head, t);
    const int64_t count = end - t < kChunkTokens ? end - t : kChunkTokens;
    if (a.values) {
      values_chunk(cache, at, count, numbers);
      for (int64_t i = 0; i < count; ++i)
        out[t + i] = value_norm<KeyRead::kF32>(reinterpret_cast<const char*>(numbers + i * dim), 4 * dim);
      continue;
    }
    keys_chunk(cache, at, numbers, kChunkTokens);
    for (int v = 0; v < kChunkVectors; ++v) {
      vf sum{};
      for (int64_t d = 0; d < dim; ++d) {
        const vf x = load<vf>(numbers + d * kChunkTokens + v * kLanes);
        sum += x * x;
      }
      store_tokens(out + t + v * kLanes, exact_sqrt(sum), count - v * kLanes);
    }
  }
}

inline void token_norms(const NormArgs& a) {
  const int64_t chunks = ceil_div(a.tokens.num_tokens, kNormChunk);
  parallel_for(a.tokens.cache.heads * chunks, [&](int64_t item) {
    const int64_t head = item / chunks, begin = item % chunks * kNormChunk;
    const int64_t left = a.tokens.num_tokens - begin, end = begin + (left < kNormChunk ? left : kNormChunk);
    switch (key_read(a.tokens.cache)) {
      case KeyRead::kF32: return norm_chunk<KeyRead::kF32>(a, head, begin, end);
      case KeyRead::kBF16: return norm_chunk<KeyRead::kBF16>(a, head, begin, end);
      case KeyRead::kChunks: return norm_decoded(a, head, begin, end);
    }
  });
}

}  // namespace kvreclaim::KVR_NS
#endif
