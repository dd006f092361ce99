// Where a token's key and value lie. Dims: L layers, B blocks, K KV heads, S slots of a block,
// D and Dv dims of a key and a value.
//
//   keys, 16 bit:  [L, B, K, D / 2, S, 2]  element (s, d) of a block of a head at ((d / 2) * S + s) * 2 + d % 2
//   keys, fp32:    [L, B, K, D, S]         element (s, d) at d * S + s
//   values:        [L, B, K, S, Dv]        row-major
//
// Either way a vector of 32-bit words along S is consecutive, words of neighbouring slots are 4 bytes
// apart, and the next "word row" (a pair of dims in 16 bit, one dim in fp32) is 4 * S bytes further.
#pragma once

#include <cstdint>

namespace kvreclaim {

enum class Type : int { kF32 = 0, kBF16 = 1 };

constexpr int64_t size_of(Type type) { return type == Type::kF32 ? 4 : 2; }

// A whole cache; k and v point at its first byte.
struct CacheView {
  char* k;
  char* v;
  int64_t layers, blocks;
  int64_t heads;       // K
  int64_t block_size;  // S, a multiple of 16
  int64_t k_dim, v_dim;  // D, Dv, multiples of 8
  Type type;
};

// A [T, H, D] tensor of the model: strides in elements, of any size.
struct RowsView {
  char* data;
  int64_t stride_t, stride_h, stride_d;
  Type type;
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include "kvreclaim/simd.h"

namespace kvreclaim::KVR_NS {

KVR_INLINE int64_t k_block_bytes(const CacheView& c) { return c.block_size * c.k_dim * size_of(c.type); }
KVR_INLINE int64_t v_block_bytes(const CacheView& c) { return c.block_size * c.v_dim * size_of(c.type); }

// First byte of one block of one head.
KVR_INLINE char* k_block(const CacheView& c, int64_t layer, int64_t block, int64_t head) {
  return c.k + ((layer * c.blocks + block) * c.heads + head) * k_block_bytes(c);
}
KVR_INLINE char* v_block(const CacheView& c, int64_t layer, int64_t block, int64_t head) {
  return c.v + ((layer * c.blocks + block) * c.heads + head) * v_block_bytes(c);
}

// Word rows of a key block, and the bytes from one to the next.
KVR_INLINE int64_t k_words(const CacheView& c) { return c.type == Type::kBF16 ? c.k_dim / 2 : c.k_dim; }
KVR_INLINE int64_t k_word_stride(const CacheView& c) { return 4 * c.block_size; }

}  // namespace kvreclaim::KVR_NS
#endif
