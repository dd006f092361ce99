// New keys and values into their slots, and a sequence's tokens out of its blocks.
#pragma once

#include "kvreclaim/layout.h"

namespace kvreclaim {

struct WriteArgs {
  CacheView cache;
  int64_t layer;
  RowsView k, v;         // [T, K, D], [T, K, Dv]; any strides, fp32 or bf16
  const int64_t* slots;  // [T] block * S + offset
  int64_t num_tokens;
};

struct GatherArgs {
  CacheView cache;
  int64_t layer;
  const int64_t* block_ids;
  int64_t num_tokens;
  char* k;  // [K, T, D], dtype of the cache, contiguous
  char* v;  // [K, T, Dv]
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include <cstring>

#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS {

constexpr int64_t kWriteChunk = 16;  // tokens of one item: neighbours share the lines of a key block

KVR_INLINE float element(const RowsView& x, const char* row, int64_t d) {
  if (x.type == Type::kF32) return reinterpret_cast<const float*>(row)[d * x.stride_d];
  return from_bf16(reinterpret_cast<const uint16_t*>(row)[d * x.stride_d]);
}

// One row of x as the cache's dtype: calls put(word, bits) for each 4-byte word of it, in order.
template <class Put>
KVR_INLINE void each_word(const RowsView& x, const char* row, int64_t dims, Type type, const Put& put) {
  if (type == x.type && x.stride_d == 1) {
    const int64_t words = dims * size_of(type) / 4;
    for (int64_t w = 0; w < words; ++w) put(w, load<uint32_t>(row + 4 * w));
  } else if (type == Type::kF32) {
    for (int64_t d = 0; d < dims; ++d) {
      const float value = element(x, row, d);
      put(d, load<uint32_t>(&value));
    }
  } else {
    for (int64_t w = 0; w < dims / 2; ++w)
      put(w, to_bf16(element(x, row, 2 * w)) | (uint32_t)to_bf16(element(x, row, 2 * w + 1)) << 16);
  }
}

inline void write_token(const WriteArgs& a, int64_t token, int64_t head) {
  const CacheView& c = a.cache;
  const int64_t block = a.slots[token] / c.block_size, offset = a.slots[token] % c.block_size;
  const char* k = a.k.data + (token * a.k.stride_t + head * a.k.stride_h) * size_of(a.k.type);
  const char* v = a.v.data + (token * a.v.stride_t + head * a.v.stride_h) * size_of(a.v.type);
  char* k_to = k_block(c, a.layer, block, head) + offset * 4;
  char* v_to = v_block(c, a.layer, block, head) + offset * c.v_dim * size_of(c.type);
  const int64_t stride = k_word_stride(c);
  each_word(a.k, k, c.k_dim, c.type, [&](int64_t w, uint32_t bits) { store(k_to + w * stride, bits); });
  if (a.v.type == c.type && a.v.stride_d == 1)
    std::memcpy(v_to, v, c.v_dim * size_of(c.type));
  else
    each_word(a.v, v, c.v_dim, c.type, [&](int64_t w, uint32_t bits) { store(v_to + w * 4, bits); });
}

// fp32 is rounded to nearest even where the cache is bf16.
inline void write_kv(const WriteArgs& a) {
  const int64_t heads = a.cache.heads, chunks = (a.num_tokens + kWriteChunk - 1) / kWriteChunk;
  parallel_for(chunks * heads, [&](int64_t item) {
    const int64_t first = item / heads * kWriteChunk, head = item % heads;
    const int64_t end = first + kWriteChunk < a.num_tokens ? first + kWriteChunk : a.num_tokens;
    for (int64_t token = first; token < end; ++token) write_token(a, token, head);
  });
}

inline void gather_block(const GatherArgs& a, int64_t index, int64_t head) {
  const CacheView& c = a.cache;
  const int64_t first = index * c.block_size, left = a.num_tokens - first;
  const int64_t count = left < c.block_size ? left : c.block_size;
  const int64_t k_bytes = c.k_dim * size_of(c.type), v_bytes = c.v_dim * size_of(c.type);
  const char* k = k_block(c, a.layer, a.block_ids[index], head);
  char* k_to = a.k + (head * a.num_tokens + first) * k_bytes;
  for (int64_t t = 0; t < count; ++t)
    for (int64_t w = 0; w < k_words(c); ++w)
      store(k_to + t * k_bytes + w * 4, load<uint32_t>(k + w * k_word_stride(c) + t * 4));
  std::memcpy(a.v + (head * a.num_tokens + first) * v_bytes, v_block(c, a.layer, a.block_ids[index], head),
              count * v_bytes);
}

inline void gather_tokens(const GatherArgs& a) {
  const int64_t heads = a.cache.heads, blocks = (a.num_tokens + a.cache.block_size - 1) / a.cache.block_size;
  parallel_for(blocks * heads, [&](int64_t item) { gather_block(a, item / heads, item % heads); });
}

}  // namespace kvreclaim::KVR_NS
#endif
