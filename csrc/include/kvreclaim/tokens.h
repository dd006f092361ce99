// The tokens of one sequence in one layer of a cache, reached through its block table.
#pragma once

#include <cstdint>

#include "kvreclaim/layout.h"

namespace kvreclaim {

// Token t is slot t % S of block block_ids[t / S]; what lies past num_tokens may be anything.
struct TokensView {
  CacheView cache;
  int64_t layer;
  const int64_t* block_ids;  // ceil(num_tokens / S), checked against cache.blocks
  int64_t num_tokens;
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include "kvreclaim/decode.h"
#include "kvreclaim/simd.h"

namespace kvreclaim::KVR_NS {

KVR_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How keys are read: as words where those are fp32 or bf16 as they lie, else decoded, 16 tokens at a time.
enum class KeyRead { kF32, kBF16, kChunks };

KVR_INLINE KeyRead key_read(const CacheView& c) {
  if (c.latent || c.formats.k > Format::kBF16) return KeyRead::kChunks;
  return c.formats.k == Format::kF32 ? KeyRead::kF32 : KeyRead::kBF16;
}

// The chunk that holds token t; past the end the last one again.
KVR_INLINE ChunkAt chunk_of(const TokensView& view, int64_t head, int64_t t) {
  const int64_t size = view.cache.block_size, known = t < view.num_tokens ? t : view.num_tokens - 1;
  return {view.layer, view.block_ids[known / size], head, known % size / kChunkTokens * kChunkTokens};
}

// First word row of the vector of tokens t ... t + kLanes - 1 (t a multiple of kLanes) of a head.
KVR_INLINE const char* key_vector(const TokensView& view, int64_t head, int64_t t) {
  const int64_t size = view.cache.block_size;
  return k_block(view.cache, view.layer, view.block_ids[t / size], head) + 4 * (t % size);
}

// The same of vector `index` of a tile that starts at token t; past the end the last vector again.
KVR_INLINE const char* tile_vector(const TokensView& view, int64_t head, int64_t t, int index) {
  const int64_t last = (view.num_tokens - 1) / kLanes * kLanes;
  const int64_t first = t + (int64_t)index * kLanes;
  return key_vector(view, head, first < last ? first : last);
}

// Lanes of v that lie below `count` tokens.
KVR_INLINE void store_tokens(float* out, vf v, int64_t count) {
  if (count >= kLanes) {
    store(out, v);
  } else if (count > 0) {
    __builtin_memcpy(out, &v, 4 * (size_t)count);
  }
}

KVR_INLINE vf exact_sqrt(vf x) {
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}

// 2 sqrt(x), relative error below 3e-7, for x >= 1e-30: a caller adds kTinySquare. Twice, because that
// saves an instruction where a weight takes the factor back.
constexpr float kTinySquare = 1e-30f;

KVR_INLINE vf twice_sqrt(vf x) {
#if defined(__AVX512F__) || defined(__AVX2__)
#if defined(__AVX512F__)
  const vf y = (vf)_mm512_maskz_rsqrt14_ps(0xffff, (__m512)x);
#else
  const vf y = (vf)_mm256_rsqrt_ps((__m256)x);
#endif
  const vf root = x * y;  // one Newton step of the reciprocal root squares its error of 2^-14 or 2^-11.4
  return root * (splat(3.0f) - root * y);
#elif defined(__SSE2__)
  return (vf)_mm_sqrt_ps((__m128)x) * 2.0f;
#else
  for (int i = 0; i < kLanes; ++i) x[i] = 2.0f * __builtin_sqrtf(x[i]);
  return x;
#endif
}

}  // namespace kvreclaim::KVR_NS
#endif
