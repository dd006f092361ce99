// Where a token's key and value lie. Dims: L layers, B blocks, K KV heads, S slots of a block,
// D and Dv dims of a key and a value, W numbers of a 32-bit word.
//
// Plain formats (fp32, bf16, fp16) keep keys and values apart:
//
//   keys, 16 bit:  [L, B, K, D / 2, S, 2]  element (s, d) of a block of a head at ((d / 2) * S + s) * 2 + d % 2
//   keys, fp32:    [L, B, K, D, S]         element (s, d) at d * S + s
//   values:        [L, B, K, S, Dv]        row-major
//
// Coded formats keep a unit, one block of one head, in one piece: [L, B, K, unit_bytes]. In it lie
//
//   key words    word (w, s) at 4 (w S + s)           dims wW ... wW + W - 1 of slot s
//   value words  word (i, d) at S D bits/8 + 4 (i Dv + d)  slots iW ... iW + W - 1 of dim d
//   parameters   planes of S bytes, a byte per slot, behind the words: the key's, the value's, one of both
//     int8, fp8, turboquant4   low 8 bits of the scale's code
//     int4                     scale and centre of each group of 32 dims
//     of both                  high 4 bits of the scales' codes, the key's in the low half; not if both are int4
//
// with bits those of the key's or the value's format, and number j of a word in bits 32 j / W and up. Units need no
// alignment.
// Either way a vector of 32-bit words of a key along S is consecutive, words of neighbouring slots are 4 bytes
// apart, and the next "word row" is 4 * S bytes further.
#pragma once

#include <cstdint>

namespace kvreclaim {

// Of the tensors that the model hands over or takes.
enum class Type : int { kF32 = 0, kBF16 = 1, kF16 = 2 };

constexpr int64_t size_of(Type type) { return type == Type::kF32 ? 4 : 2; }

// Of the numbers of keys or of values in a cache.
enum class Format : int { kF32, kBF16, kF16, kFP8, kInt8, kInt4, kTurbo4 };

constexpr int64_t bits_of(Format format) {
  return format == Format::kF32 ? 32 : format <= Format::kF16 ? 16 : format <= Format::kInt8 ? 8 : 4;
}
constexpr bool is_plain(Format format) { return format <= Format::kF16; }
constexpr bool is_rotated(Format format) { return format == Format::kInt4 || format == Format::kTurbo4; }
// A scale and a centre for each group of dims, or one scale for all of a vector's.
constexpr bool has_groups(Format format) { return format == Format::kInt4; }

// Bytes of a number of a plain format.
constexpr int64_t size_of(Format format) { return bits_of(format) / 8; }

// Of keys and of values.
struct Formats {
  Format k, v;

  constexpr Formats(Format both) : k(both), v(both) {}
  constexpr Formats(Format k, Format v) : k(k), v(v) {}
};
constexpr bool is_plain(Formats formats) { return is_plain(formats.k); }

// Those that a cache may have; the order is that of ops/native/storage.py.
constexpr Formats kCacheFormats[] = {
    Format::kF32,  Format::kBF16, Format::kF16,    Format::kFP8,
    Format::kInt8, Format::kInt4, Format::kTurbo4, {Format::kInt8, Format::kInt4}};

constexpr int64_t kGroup = 32;  // dims that share a scale in 4 bits
constexpr int64_t groups_of(int64_t dim) { return (dim + kGroup - 1) / kGroup; }

// A whole cache. Plain: k and v point at its first byte, data is null. Coded: data does, k and v are null.
struct CacheView {
  char* data;
  char *k, *v;
  int64_t k_stride, v_stride;  // plain: bytes from one block of a head to the next
  int64_t layers, blocks;
  int64_t heads;         // K
  int64_t block_size;    // S, a multiple of 16
  int64_t k_dim, v_dim;  // D, Dv as stored, multiples of 8
  Formats formats{Format::kF32};
  bool latent;  // a key is [value; stored key]: its first Dv dims are the value's
  const float *k_signs, *v_signs;  // [D], [Dv] of the rotation, if is_rotated
};

// Dims of a key as the queries see it.
constexpr int64_t head_dim(const CacheView& c) { return c.latent ? c.v_dim + c.k_dim : c.k_dim; }

// Bytes of a unit's key words and of its value words.
constexpr int64_t k_code_bytes(const CacheView& c) { return c.block_size * c.k_dim * bits_of(c.formats.k) / 8; }
constexpr int64_t v_code_bytes(const CacheView& c) { return c.block_size * c.v_dim * bits_of(c.formats.v) / 8; }

// Coded formats: planes of parameters that keys or values have alone; the values' first one, and that of both.
constexpr int64_t own_planes(Format format, int64_t dim) { return has_groups(format) ? 2 * groups_of(dim) : 1; }
constexpr int64_t v_plane(const CacheView& c) { return own_planes(c.formats.k, c.k_dim); }
constexpr int64_t high_plane(const CacheView& c) { return v_plane(c) + own_planes(c.formats.v, c.v_dim); }

// Bytes of a token's parameters: the planes behind the words.
constexpr int64_t slot_params(const CacheView& c) {
  if (is_plain(c.formats)) return 0;
  return high_plane(c) + (has_groups(c.formats.k) && has_groups(c.formats.v) ? 0 : 1);
}

// Bytes of one block of one head in one layer, keys and values.
constexpr int64_t unit_bytes(const CacheView& c) {
  return k_code_bytes(c) + v_code_bytes(c) + c.block_size * slot_params(c);
}

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

// Plain formats: bytes and first byte of one block of one head. Blocks may lie apart: beside the codes of others.
KVR_INLINE int64_t k_block_bytes(const CacheView& c) { return c.block_size * c.k_dim * size_of(c.formats.k); }
KVR_INLINE int64_t v_block_bytes(const CacheView& c) { return c.block_size * c.v_dim * size_of(c.formats.v); }

KVR_INLINE char* k_block(const CacheView& c, int64_t layer, int64_t block, int64_t head) {
  return c.k + ((layer * c.blocks + block) * c.heads + head) * c.k_stride;
}
KVR_INLINE char* v_block(const CacheView& c, int64_t layer, int64_t block, int64_t head) {
  return c.v + ((layer * c.blocks + block) * c.heads + head) * c.v_stride;
}

// Coded formats: first byte of a unit (its key words), and from there to the value words and the parameters.
KVR_INLINE char* unit(const CacheView& c, int64_t layer, int64_t block, int64_t head) {
  return c.data + ((layer * c.blocks + block) * c.heads + head) * unit_bytes(c);
}
KVR_INLINE int64_t v_codes(const CacheView& c) { return k_code_bytes(c); }
KVR_INLINE int64_t params(const CacheView& c) { return k_code_bytes(c) + v_code_bytes(c); }

// Word rows of a key block, and the bytes from one to the next.
KVR_INLINE int64_t k_words(const CacheView& c) { return c.k_dim * bits_of(c.formats.k) / 32; }
KVR_INLINE int64_t k_word_stride(const CacheView& c) { return 4 * c.block_size; }

KVR_INLINE const char* row_of(const RowsView& x, int64_t token, int64_t head) {
  return x.data + (token * x.stride_t + head * x.stride_h) * size_of(x.type);
}

}  // namespace kvreclaim::KVR_NS
#endif
