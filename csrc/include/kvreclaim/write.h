// New keys and values into their slots, and a sequence's tokens out of its blocks.
#pragma once

#include "kvreclaim/layout.h"

namespace kvreclaim {

struct WriteArgs {
  CacheView cache;
  int64_t layer;
  RowsView k, v;         // [T, K, D], [T, K, Dv] as stored; any strides, any type
  const int64_t* slots;  // [T] block * S + offset
  int64_t num_tokens;
};

struct GatherArgs {
  CacheView cache;
  int64_t layer;
  const int64_t* block_ids;
  int64_t num_tokens;
  char* k;  // [K, T, head_dim], dtype of a plain cache, fp32 of a coded one, contiguous
  char* v;  // [K, T, Dv]
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include <cstring>
#include <vector>

#include "kvreclaim/decode.h"
#include "kvreclaim/encode_chunk.h"
#include "kvreclaim/memory.h"
#include "kvreclaim/threads.h"

namespace kvreclaim::KVR_NS {

constexpr int64_t kWriteChunk = 16;  // tokens of one item: neighbours share the lines of a key block
constexpr int64_t kSerialNumbers = 16 * 1024, kSerialCodes = 4 * 1024;  // below these, threads are not woken

KVR_INLINE float element(const RowsView& x, const char* row, int64_t d) { return element(x.type, row, d * x.stride_d); }

KVR_INLINE uint16_t to_half(Format format, float x) { return format == Format::kBF16 ? to_bf16(x) : to_f16(x); }

KVR_INLINE bool stored_as_is(const RowsView& x, Format format) {
  return (int)x.type == (int)format && x.stride_d == 1;
}

// One row of x as a plain format's numbers: calls put(word, bits) for each 4-byte word of it, in order.
template <class Put>
KVR_INLINE void each_word(const RowsView& x, const char* row, int64_t dims, Format format, const Put& put) {
  if (stored_as_is(x, format)) {
    const int64_t words = dims * size_of(format) / 4;
    for (int64_t w = 0; w < words; ++w) put(w, load<uint32_t>(row + 4 * w));
  } else if (format == Format::kF32) {
    for (int64_t d = 0; d < dims; ++d) {
      const float value = element(x, row, d);
      put(d, load<uint32_t>(&value));
    }
  } else {
    for (int64_t w = 0; w < dims / 2; ++w)
      put(w, to_half(format, element(x, row, 2 * w)) | (uint32_t)to_half(format, element(x, row, 2 * w + 1)) << 16);
  }
}

inline void write_token(const WriteArgs& a, int64_t token, int64_t head) {
  const CacheView& c = a.cache;
  const int64_t block = a.slots[token] / c.block_size, offset = a.slots[token] % c.block_size;
  const char *k = row_of(a.k, token, head), *v = row_of(a.v, token, head);
  char* k_to = k_block(c, a.layer, block, head) + offset * 4;
  char* v_to = v_block(c, a.layer, block, head) + offset * c.v_dim * size_of(c.formats.v);
  const int64_t stride = k_word_stride(c);
  each_word(a.k, k, c.k_dim, c.formats.k, [&](int64_t w, uint32_t bits) { store(k_to + w * stride, bits); });
  if (stored_as_is(a.v, c.formats.v))
    std::memcpy(v_to, v, c.v_dim * size_of(c.formats.v));
  else
    each_word(a.v, v, c.v_dim, c.formats.v, [&](int64_t w, uint32_t bits) { store(v_to + w * 4, bits); });
}

inline float* as_floats(const RowsView& x, int64_t token, int64_t head, int64_t dims, float* to) {
  const char* row = row_of(x, token, head);
  if (x.stride_d == 1)
    row_values((Format)x.type, row, dims, {1, 0, dims, to, dims});
  else
    for (int64_t d = 0; d < dims; ++d) to[d] = element(x, row, d);
  return to;
}

inline void encode_token(const WriteArgs& a, int64_t token, int64_t head, float* row) {
  const CacheView& c = a.cache;
  const int64_t slot = a.slots[token] % c.block_size;
  char* own = unit(c, a.layer, a.slots[token] / c.block_size, head);
  encode_key(c, own, slot, as_floats(a.k, token, head, c.k_dim, row));
  encode_value(c, own, slot, as_floats(a.v, token, head, c.v_dim, row));
}

KVR_INLINE TokenRows token_rows(const RowsView& x, int64_t token, int64_t head) {
  TokenRows rows{{}, x.type, x.stride_d};
  for (int i = 0; i < kChunkTokens; ++i) rows.at[i] = row_of(x, token + i, head);
  return rows;
}

inline void encode_tokens(const WriteArgs& a, int64_t first, int64_t head) {
  const CacheView& c = a.cache;
  const int64_t slot = a.slots[first] % c.block_size;
  char* own = unit(c, a.layer, a.slots[first] / c.block_size, head);
  float* x = thread_scratch(encode_chunk_floats(c.k_dim > c.v_dim ? c.k_dim : c.v_dim));
  encode_chunk(c, own, slot, true, token_rows(a.k, first, head), x);
  encode_chunk(c, own, slot, false, token_rows(a.v, first, head), x);
}

// Whether this token and the 15 after it fill 16 slots that share their words with no others.
inline bool fills_chunk(const WriteArgs& a, int64_t token) {
  const int64_t* slots = a.slots + token;
  if (token + kChunkTokens > a.num_tokens || slots[0] % kChunkTokens != 0) return false;
  for (int i = 1; i < kChunkTokens; ++i)
    if (slots[i] != slots[0] + i) return false;
  return true;
}

// A few tokens are not worth waking threads.
template <class Body>
inline void for_items(bool alone, int64_t items, const Body& body) {
  if (!alone) return parallel_for(items, body);
  for (int64_t i = 0; i < items; ++i) body(i);
}

// Tokens by 16 where they fill as many slots. Of the others those of a unit share bytes: one thread writes them.
inline void write_coded(const WriteArgs& a, bool alone) {
  const CacheView& c = a.cache;
  std::vector<int64_t> chunks, others;
  for (int64_t token = 0; token < a.num_tokens;) {
    const bool fills = fills_chunk(a, token);
    (fills ? chunks : others).push_back(token);
    token += fills ? kChunkTokens : 1;
  }
  const int64_t heads = c.heads, count = heads * (int64_t)chunks.size();
  const int64_t parts = others.size() < kWriteChunk ? !others.empty() : (2 * max_threads() + heads - 1) / heads;
  const auto write = [&](int64_t item) {
    if (item < count) return encode_tokens(a, chunks[item / heads], item % heads);
    float* row = thread_scratch(c.k_dim > c.v_dim ? c.k_dim : c.v_dim);
    for (const int64_t token : others)
      if (a.slots[token] / c.block_size % parts == (item - count) / heads)
        encode_token(a, token, (item - count) % heads, row);
  };
  for_items(alone, count + heads * parts, write);
}

// Numbers are rounded to nearest even where the cache's are narrower.
inline void write_kv(const WriteArgs& a) {
  const CacheView& c = a.cache;
  const int64_t heads = c.heads, chunks = (a.num_tokens + kWriteChunk - 1) / kWriteChunk;
  const int64_t numbers = a.num_tokens * heads * (c.k_dim + c.v_dim);
  if (!is_plain(c.formats)) return write_coded(a, numbers < kSerialCodes);
  for_items(numbers < kSerialNumbers, chunks * heads, [&](int64_t item) {
    const int64_t first = item / heads * kWriteChunk, head = item % heads;
    const int64_t end = first + kWriteChunk < a.num_tokens ? first + kWriteChunk : a.num_tokens;
    for (int64_t token = first; token < end; ++token) write_token(a, token, head);
  });
}

inline void gather_block(const GatherArgs& a, int64_t index, int64_t head) {
  const CacheView& c = a.cache;
  const int64_t first = index * c.block_size, left = a.num_tokens - first;
  const int64_t count = left < c.block_size ? left : c.block_size;
  const int64_t dims = head_dim(c), size = size_of(c.formats.k), k_bytes = dims * size, v_bytes = c.v_dim * size;
  const char* k = k_block(c, a.layer, a.block_ids[index], head);
  const char* v = v_block(c, a.layer, a.block_ids[index], head);
  char* k_to = a.k + (head * a.num_tokens + first) * k_bytes;
  for (int64_t t = 0; t < count; ++t, k_to += k_bytes) {
    char* to = k_to;
    if (c.latent) {
      std::memcpy(to, v + t * v_bytes, v_bytes);
      to += v_bytes;
    }
    for (int64_t w = 0; w < k_words(c); ++w) store(to + w * 4, load<uint32_t>(k + w * k_word_stride(c) + t * 4));
  }
  std::memcpy(a.v + (head * a.num_tokens + first) * v_bytes, v, count * v_bytes);
}

// A block of a coded format, decoded; panel holds 16 tokens' keys.
inline void decode_block(const GatherArgs& a, int64_t index, int64_t head, float* panel) {
  const CacheView& c = a.cache;
  const int64_t dims = head_dim(c), first = index * c.block_size;
  const int64_t end = first + c.block_size < a.num_tokens ? first + c.block_size : a.num_tokens;
  for (int64_t t = first; t < end; t += kChunkTokens) {
    const ChunkAt at{a.layer, a.block_ids[index], head, t - first};
    const int64_t count = end - t < kChunkTokens ? end - t : kChunkTokens;
    float* k = reinterpret_cast<float*>(a.k) + (head * a.num_tokens + t) * dims;
    plain_keys_chunk(c, at, panel, kChunkTokens);
    const int64_t fours = count / 4 * 4;
    transpose(panel, kChunkTokens, dims, fours, k, dims);
    for (int64_t i = fours; i < count; ++i)
      for (int64_t d = 0; d < dims; ++d) k[i * dims + d] = panel[d * kChunkTokens + i];
    plain_values_chunk(c, at, count, reinterpret_cast<float*>(a.v) + (head * a.num_tokens + t) * c.v_dim);
  }
}

inline void gather_tokens(const GatherArgs& a) {
  const CacheView& c = a.cache;
  const int64_t heads = c.heads, blocks = (a.num_tokens + c.block_size - 1) / c.block_size;
  parallel_for(blocks * heads, [&](int64_t item) {
    if (is_plain(c.formats)) return gather_block(a, item / heads, item % heads);
    decode_block(a, item / heads, item % heads, thread_scratch(head_dim(c) * kChunkTokens));
  });
}

}  // namespace kvreclaim::KVR_NS
#endif
