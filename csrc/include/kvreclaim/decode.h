// Sixteen tokens of one block of one head as fp32, whatever the format: what every kernel but the fastest
// attention loops reads a cache through. Oracle: ops/formats/codecs.py.
//
// Numbers of a rotated format come out in the rotated domain, where dot products are the same: a caller turns
// its queries (rotate.h), or takes plain_keys_chunk and plain_values_chunk.
#pragma once

#include "kvreclaim/layout.h"

#ifdef KVR_NS
#include "kvreclaim/half.h"
#include "kvreclaim/rotate.h"
#include "kvreclaim/scale.h"

namespace kvreclaim::KVR_NS {

constexpr int kChunkTokens = 16;
constexpr int kChunkVectors = kChunkTokens / kLanes;
constexpr int64_t kLatentPiece = 64;  // dims of a latent value that are transposed at once

struct ChunkAt {
  int64_t layer, block, head, slot;  // slot % 16 == 0
};

// Published Lloyd-Max levels for N(0, 1) in 4 bits.
alignas(64) constexpr float kLevels[16] = {-2.7326f, -2.069f, -1.618f, -1.2562f, -.9423f, -.6568f, -.388f, -.1284f,
                                           .1284f,   .388f,   .6568f,  .9423f,   1.2562f, 1.618f,  2.069f, 2.7326f};

KVR_INLINE vf to_float(vu x) { return __builtin_convertvector((vi)x, vf); }

// Number j of each word, before its scale; of 4 bits without a table: its code.
template <Format F>
KVR_INLINE vf number(vu words, int j) {
  if constexpr (F == Format::kInt8) return to_float(words >> (8 * j) & 255u) - 128.0f;
  if constexpr (F == Format::kFP8) {
    const vu byte = words >> (8 * j);
    const vf size = (vf)((byte & 127u) << 20) * 0x1p120f;  // exponent bias 127 - 7
    return (vf)((vu)size | (byte & 128u) << 24);
  }
  if constexpr (F == Format::kTurbo4) return lookup16(kLevels, words >> (4 * j) & 15u);
  return to_float(words >> (4 * j) & 15u);
}

// Scales of the vector of tokens at `slot`: of keys (side 0) or values (side 1).
KVR_INLINE vf fine_scales(const CacheView& c, const char* own, int64_t slot, int side) {
  const Format format = side == 0 ? c.formats.k : c.formats.v;
  const char* planes = own + params(c) + slot;
  const vu low = load_bytes(planes + (side == 0 ? 0 : v_plane(c)) * c.block_size);
  const vu high = load_bytes(planes + high_plane(c) * c.block_size) >> (4 * side) & 15u;
  const vu code = low | high << 8;
  const vf scale = fine(code, fine_bias(format));
  return is_rotated(format) ? select((vi)code == 0, vf{}, scale) : scale;
}

// A group's scale and what joins its codes, centre - 7.5: x = scale (n + first).
struct Affine {
  vf scale, first;
};

// From the two planes of a group; a centre of 0 (-128) says that all numbers are zero.
KVR_INLINE Affine group_params(const char* planes, int64_t size) {
  const vu centre = load_bytes(planes + size);
  const vf scale = select((vi)centre == 0, vf{}, coarse(load_bytes(planes)));
  return {scale, (to_float(centre) - 128.0f) / 3.0f - 7.5f};
}

// to[d * stride + i] = the key of token i, for 8 bits and turboquant4.
template <Format F>
inline void scaled_keys(const CacheView& c, const char* own, int64_t slot, float* to, int64_t stride) {
  constexpr int W = 32 / (int)bits_of(F);
  for (int v = 0; v < kChunkVectors; ++v) {
    const vf scale = fine_scales(c, own, slot + v * kLanes, 0);
    const char* words = own + 4 * (slot + v * kLanes);
    float* out = to + v * kLanes;
    for (int64_t w = 0; w < k_words(c); ++w, words += k_word_stride(c)) {
      const vu x = load<vu>(words);
#pragma GCC unroll 8
      for (int j = 0; j < W; ++j, out += stride) store(out, number<F>(x, j) * scale);
    }
  }
}

// 4 bits by groups of dims; planes are the keys' parameters.
inline void grouped_keys(const CacheView& c, const char* own, int64_t slot, float* to, int64_t stride) {
  const char* planes = own + params(c) + slot;
  constexpr int64_t kWords = kGroup / 8;
  for (int v = 0; v < kChunkVectors; ++v) {
    const char* words = own + 4 * (slot + v * kLanes);
    float* out = to + v * kLanes;
    Affine group{};
    for (int64_t w = 0; w < k_words(c); ++w, words += k_word_stride(c)) {
      if (w % kWords == 0) group = group_params(planes + w / kWords * 2 * c.block_size + v * kLanes, c.block_size);
      const vu x = load<vu>(words);
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j, out += stride)
        store(out, (number<Format::kInt4>(x, j) + group.first) * group.scale);
    }
  }
}

// Rows and columns of 4 x 4 numbers.
KVR_INLINE void exchange(Vec<4>::F (&x)[4]) {
  using F = Vec<4>::F;
  const F low01 = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5);
  const F low23 = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
  const F high01 = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
  const F high23 = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
  x[0] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
  x[1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
  x[2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
  x[3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
}

// to[c * to_stride + r] = from[r * from_stride + c]; rows and columns are multiples of 4.
inline void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to,
                      int64_t to_stride) {
  for (int64_t c = 0; c < columns; c += 4)
    for (int64_t r = 0; r < rows; r += 4) {
      Vec<4>::F four[4];
      for (int i = 0; i < 4; ++i) four[i] = load<Vec<4>::F>(from + (r + i) * from_stride + c);
      exchange(four);
      for (int i = 0; i < 4; ++i) store(to + (c + i) * to_stride + r, four[i]);
    }
}

inline void plain_format_keys(const CacheView& c, const ChunkAt& at, float* to, int64_t stride) {
  const char* words = k_block(c, at.layer, at.block, at.head) + 4 * at.slot;
  for (int64_t w = 0; w < k_words(c); ++w, words += k_word_stride(c))
    for (int v = 0; v < kChunkVectors; ++v) {
      const vu x = load<vu>(words + 4 * v * kLanes);
      float* out = to + v * kLanes;
      if (c.formats.k == Format::kF32) {
        store(out + w * stride, x);
      } else if (c.formats.k == Format::kBF16) {
        store(out + 2 * w * stride, even(x));
        store(out + (2 * w + 1) * stride, odd(x));
      } else {
        store(out + 2 * w * stride, widen_f16(x << 16));
        store(out + (2 * w + 1) * stride, widen_f16(x));
      }
    }
}

inline void stored_keys(const CacheView& c, const ChunkAt& at, float* to, int64_t stride) {
  if (is_plain(c.formats)) return plain_format_keys(c, at, to, stride);
  const char* own = unit(c, at.layer, at.block, at.head);
  switch (c.formats.k) {
    case Format::kFP8: return scaled_keys<Format::kFP8>(c, own, at.slot, to, stride);
    case Format::kInt8: return scaled_keys<Format::kInt8>(c, own, at.slot, to, stride);
    case Format::kTurbo4: return scaled_keys<Format::kTurbo4>(c, own, at.slot, to, stride);
    default: return grouped_keys(c, own, at.slot, to, stride);
  }
}

// Some dims of the values of some tokens of a chunk: to[i * stride + d - begin], begin % 32 == 0.
struct ValuePart {
  int64_t count, begin, end;
  float* to;
  int64_t stride;
};

// One vector of dims (kHalf: only its lower half is there) of the value words, for 8 bits and turboquant4.
template <Format F, int N>
KVR_INLINE void scaled_value_vector(const CacheView& c, const char* words, const float* scales, const ValuePart& part,
                                    int64_t d) {
  constexpr int W = 32 / (int)bits_of(F);
  for (int64_t i = 0; i * W < part.count; ++i) {
    vu x{};
    __builtin_memcpy(&x, words + 4 * (i * c.v_dim + d), 4 * N);
#pragma GCC unroll 8
    for (int j = 0; j < W; ++j) {
      const int64_t token = i * W + j;
      if (token >= part.count) break;
      const vf y = number<F>(x, j) * scales[token];
      __builtin_memcpy(part.to + token * part.stride + d - part.begin, &y, 4 * N);
    }
  }
}

template <Format F>
inline void scaled_values(const CacheView& c, const char* own, int64_t slot, const ValuePart& part) {
  alignas(64) float scales[kChunkTokens];
  for (int v = 0; v < kChunkVectors; ++v) store(scales + v * kLanes, fine_scales(c, own, slot + v * kLanes, 1));
  const char* words = own + v_codes(c) + slot * bits_of(F) / 8 * c.v_dim;
  int64_t d = part.begin;
  for (; d + kLanes <= part.end; d += kLanes) scaled_value_vector<F, kLanes>(c, words, scales, part, d);
  if constexpr (kLanes > 8) {
    if (d < part.end) scaled_value_vector<F, 8>(c, words, scales, part, d);
  }
}

// A group of 4-bit values: what Affine holds, for each token.
struct GroupOfTokens {
  alignas(64) float scale[kChunkTokens];
  alignas(64) float first[kChunkTokens];
};

template <int N>
KVR_INLINE void grouped_value_vector(const CacheView& c, const char* words, const GroupOfTokens& group,
                                     const ValuePart& part, int64_t d) {
  for (int64_t i = 0; i * 8 < part.count; ++i) {
    vu x{};
    __builtin_memcpy(&x, words + 4 * (i * c.v_dim + d), 4 * N);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const int64_t token = i * 8 + j;
      if (token >= part.count) break;
      const vf y = (number<Format::kInt4>(x, j) + group.first[token]) * group.scale[token];
      __builtin_memcpy(part.to + token * part.stride + d - part.begin, &y, 4 * N);
    }
  }
}

inline void open_value_group(const CacheView& c, const char* own, int64_t slot, int64_t g, GroupOfTokens& to) {
  const char* planes = own + params(c) + (v_plane(c) + 2 * g) * c.block_size + slot;
  for (int v = 0; v < kChunkVectors; ++v) {
    const Affine group = group_params(planes + v * kLanes, c.block_size);
    store(to.scale + v * kLanes, group.scale);
    store(to.first + v * kLanes, group.first);
  }
}

inline void grouped_values(const CacheView& c, const char* own, int64_t slot, const ValuePart& part) {
  const char* words = own + v_codes(c) + slot / 2 * c.v_dim;
  GroupOfTokens group;
  for (int64_t d = part.begin; d < part.end;) {
    open_value_group(c, own, slot, d / kGroup, group);
    const int64_t end = d + kGroup < part.end ? d + kGroup : part.end;
    for (; d + kLanes <= end; d += kLanes) grouped_value_vector<kLanes>(c, words, group, part, d);
    if constexpr (kLanes > 8) {
      if (d < end) grouped_value_vector<8>(c, words, group, part, d), d += 8;
    }
  }
}

// 16-bit or fp32 rows.
inline void row_values(Format format, const char* rows, int64_t dim, const ValuePart& part) {
  for (int64_t i = 0; i < part.count; ++i) {
    const char* from = rows + i * dim * size_of(format);
    float* to = part.to + i * part.stride;
    if (format == Format::kF32) {
      __builtin_memcpy(to, from + 4 * part.begin, 4 * (size_t)(part.end - part.begin));
      continue;
    }
    for (int64_t d = part.begin; d < part.end; d += 8) {
      typedef uint16_t Half __attribute__((vector_size(16)));
      using V = Vec<8>;
      const V::U x = __builtin_convertvector(load<Half>(from + 2 * d), V::U) << 16;
      store(to + d - part.begin, format == Format::kBF16 ? (V::F)x : widen_f16(x));
    }
  }
}

inline void stored_values(const CacheView& c, const ChunkAt& at, const ValuePart& part) {
  if (is_plain(c.formats)) {
    const char* rows = v_block(c, at.layer, at.block, at.head) + at.slot * c.v_dim * size_of(c.formats.v);
    return row_values(c.formats.v, rows, c.v_dim, part);
  }
  const char* own = unit(c, at.layer, at.block, at.head);
  switch (c.formats.v) {
    case Format::kFP8: return scaled_values<Format::kFP8>(c, own, at.slot, part);
    case Format::kInt8: return scaled_values<Format::kInt8>(c, own, at.slot, part);
    case Format::kTurbo4: return scaled_values<Format::kTurbo4>(c, own, at.slot, part);
    default: return grouped_values(c, own, at.slot, part);
  }
}

// to[i * Dv + d] = the value of token at.slot + i, for i < count <= 16; nothing else is written.
inline void values_chunk(const CacheView& c, const ChunkAt& at, int64_t count, float* to) {
  stored_values(c, at, {count, 0, c.v_dim, to, c.v_dim});
}

// to[d * stride + i] = the key of token at.slot + i, 16 tokens, all dims that queries have.
inline void keys_chunk(const CacheView& c, const ChunkAt& at, float* to, int64_t stride) {
  if (!c.latent) return stored_keys(c, at, to, stride);
  alignas(64) float rows[kChunkTokens * kLatentPiece];
  for (int64_t d = 0; d < c.v_dim; d += kLatentPiece) {
    const int64_t end = d + kLatentPiece < c.v_dim ? d + kLatentPiece : c.v_dim;
    stored_values(c, at, {kChunkTokens, d, end, rows, kLatentPiece});
    transpose(rows, kLatentPiece, kChunkTokens, end - d, to + d * stride, stride);
  }
  stored_keys(c, at, to + c.v_dim * stride, stride);
}

// The same in the domain of the tokens that were written.
inline void plain_keys_chunk(const CacheView& c, const ChunkAt& at, float* to, int64_t stride) {
  keys_chunk(c, at, to, stride);
  if (c.latent && is_rotated(c.formats.v)) unrotate_panel(c.v_signs, c.v_dim, to, stride);
  if (is_rotated(c.formats.k)) unrotate_panel(c.k_signs, c.k_dim, c.latent ? to + c.v_dim * stride : to, stride);
}

inline void plain_values_chunk(const CacheView& c, const ChunkAt& at, int64_t count, float* to) {
  values_chunk(c, at, count, to);
  if (!is_rotated(c.formats.v)) return;
  for (int64_t i = 0; i < count; ++i) unrotate_row(c.v_signs, c.v_dim, to + i * c.v_dim);
}

}  // namespace kvreclaim::KVR_NS
#endif
