// Sixteen tokens that fill an aligned part of a block, as codes: what encode.h does, with tokens along the lanes, so
// that all of it is vertical, and equal bit for bit. No byte of such a part is any other token's.
// Oracle: ops/formats/codecs.py.
#pragma once

#include "kvreclaim/layout.h"

#ifdef KVR_NS
#include <array>

#include "kvreclaim/encode.h"

namespace kvreclaim::KVR_NS {

// The keys or values of 16 tokens of one head, wherever each lies.
struct TokenRows {
  const char* at[kChunkTokens];
  Type type;
  int64_t stride_d;
};

KVR_INLINE float element(Type type, const char* row, int64_t i) {
  if (type == Type::kF32) return reinterpret_cast<const float*>(row)[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[i];
  return type == Type::kBF16 ? from_bf16(bits) : from_f16(bits);
}

// to[w * 16 + token] = 32-bit word w of each row; words % 4 == 0.
inline void transpose_words(const TokenRows& rows, int64_t words, float* to) {
  for (int64_t w = 0; w < words; w += 4)
    for (int t = 0; t < kChunkTokens; t += 4) {
      Vec<4>::F four[4];
      for (int i = 0; i < 4; ++i) four[i] = load<Vec<4>::F>(rows.at[t + i] + 4 * w);
      exchange(four);
      for (int i = 0; i < 4; ++i) store(to + (w + i) * kChunkTokens + t, four[i]);
    }
}

// Words of two 16-bit numbers in the upper half of a panel become the whole panel, from its start on.
template <Type T>
inline void widen_panel(int64_t dims, float* x) {
  const float* words = x + dims / 2 * kChunkTokens;
  for (int64_t i = 0; i < dims / 2 * kChunkTokens; i += kLanes) {
    const vu word = load<vu>(words + i);
    float* to = x + i / kChunkTokens * 2 * kChunkTokens + i % kChunkTokens;
    store(to, T == Type::kBF16 ? even(word) : widen_f16(word << 16));
    store(to + kChunkTokens, T == Type::kBF16 ? odd(word) : widen_f16(word));
  }
}

// x[d * 16 + token], the numbers as they are.
inline void load_panel(const TokenRows& rows, int64_t dims, float* x) {
  if (rows.stride_d != 1) {
    for (int t = 0; t < kChunkTokens; ++t)
      for (int64_t d = 0; d < dims; ++d) x[d * kChunkTokens + t] = element(rows.type, rows.at[t], d * rows.stride_d);
  } else if (rows.type == Type::kF32) {
    transpose_words(rows, dims, x);
  } else {
    transpose_words(rows, dims / 2, x + dims / 2 * kChunkTokens);
    rows.type == Type::kBF16 ? widen_panel<Type::kBF16>(dims, x) : widen_panel<Type::kF16>(dims, x);
  }
}

// A vector of tokens of a chunk: x[d * 16] is their dim d, word w goes to words + w * stride.
struct Lanes {
  const CacheView& cache;
  char* own;  // the unit
  int64_t slot;
  bool key;
  int64_t dims;
  float* x;
  char* words;
  int64_t stride;

  // First plane of the parameters that are of keys or values alone.
  KVR_INLINE char* own_params() const {
    return own + params(cache) + (key ? 0 : v_plane(cache) * cache.block_size) + slot;
  }
  KVR_INLINE vf at(int64_t d) const { return load<vf>(x + d * kChunkTokens); }
};

// Dims begin ... end - 1 by codes(d).
template <int Bits, class Codes>
KVR_INLINE void put_words(const Lanes& a, int64_t begin, int64_t end, const Codes& codes) {
  constexpr int W = 32 / Bits;
  for (int64_t d = begin; d < end; d += W) {
    vu word = codes(d);
#pragma GCC unroll 8
    for (int j = 1; j < W; ++j) word |= codes(d + j) << (Bits * j);
    store(a.words + d / W * a.stride, word);
  }
}

KVR_INLINE void put_fine(const Lanes& a, vu code) {
  const CacheView& c = a.cache;
  store_bytes(a.own_params(), code & 255u);
  char* plane = a.own + params(c) + high_plane(c) * c.block_size + a.slot;
  const vu high = load_bytes(plane);
  store_bytes(plane, a.key ? (high & 0xf0u) | code >> 8 : (high & 0x0fu) | code >> 8 << 4);
}

template <Format F>
inline void encode_vectors(const Lanes& a) {
  constexpr float most = F == Format::kInt8 ? 127.0f : 448.0f;
  vf size{};
  for (int64_t d = 0; d < a.dims; ++d) size = vmax(size, (vf)((vu)a.at(d) & 0x7fffffffu));
  const vu code = fine_codes(size / most, fine_bias(F));
  const Divisor scale(fine(code, fine_bias(F)));
  put_fine(a, code);
  put_words<8>(a, 0, a.dims, [&](int64_t d) {
    const vf y = clamp(scale.under(a.at(d)), -most, most);
    return F == Format::kInt8 ? to_codes(round_even(y) + 128.0f) : fp8_codes(y);
  });
}

// The levels that each number is above, found by halving.
alignas(64) constexpr std::array<float, 16> kBetween = [] {
  std::array<float, 16> between{};
  for (int i = 0; i < 15; ++i) between[i] = (kLevels[i + 1] + kLevels[i]) / 2.0f;
  return between;
}();

KVR_INLINE vu nearest_levels_of(vf x) {
  vu below{};
#pragma GCC unroll 4
  for (uint32_t step = 8; step > 0; step /= 2)
    below = select(x > lookup16(kBetween.data(), below + (step - 1u)), below + step, below);
  return below;
}

// As root_mean_square, whose eight sums are those of every eighth dim.
KVR_INLINE vf root_mean_squares(const Lanes& a) {
  vf sums[8] = {};
  for (int64_t d = 0; d < a.dims; d += 8)
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) sums[j] += a.at(d + j) * a.at(d + j);
  vf sum = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  for (int i = 0; i < kLanes; ++i) sum[i] = std::sqrt(sum[i]);
  return sum / std::sqrt((float)a.dims);
}

inline void encode_levels(const Lanes& a) {
  const vf size = root_mean_squares(a);
  const vu found = fine_codes(size, fine_bias(Format::kTurbo4));
  const vu code = select((vi)(size == 0), vu{}, select((vi)found == 0, vu{} + 1u, found));
  const Divisor scale(fine(code, fine_bias(Format::kTurbo4)));
  const float factor = hadamard_factor(a.dims);
  put_fine(a, code);
  hadamard_panel(a.dims, a.x, kChunkTokens);
  put_words<4>(a, 0, a.dims, [&](int64_t d) { return nearest_levels_of(scale.under(a.at(d) * factor)); });
}

// A group per lane.
struct GroupLanes {
  vu scale_code, centre_code;
  Divisor scale;
  vf first;
  vi nothing;  // where all numbers are zero

  KVR_INLINE vu codes(vf x) const {
    return to_codes(round_even(clamp(scale.under(x) - first, 0.0f, 15.0f))) & (vu)~nothing;
  }
};

// As encode_group. The numbers' order of size does not change where they are cut, so the ends alone are.
KVR_INLINE GroupLanes group_of(const Lanes& a, int64_t begin, int64_t end, float factor) {
  vf low = a.at(begin), high = low;
  for (int64_t d = begin + 1; d < end; ++d) {
    const vf x = a.at(d);
    low = vmin(low, x), high = vmax(high, x);
  }
  low = clamp(low * factor, -kLargest, kLargest), high = clamp(high * factor, -kLargest, kLargest);
  const vf centre = (low + high) / 2.0f, size = (vf)((vu)centre & 0x7fffffffu) / 40.5f;
  const vi nothing = (vi)(low == 0) & (vi)(high == 0);
  const vu code = coarse_codes(vmax((high - low) / 15.0f, size)) & (vu)~nothing;
  const Divisor scale(coarse(code));
  const vf half = select((vi)(low < 0), splat(-0.5f), splat(0.5f));
  const vf beside = select((vi)(low != high), vf{}, half);
  const vf found = round_even(clamp(3.0f * (scale.under(centre) - beside), -127.0f, 127.0f));
  const vf z = select(nothing, splat(-128.0f), found);
  return {code, to_codes(z + 128.0f), scale, z / 3.0f - 7.5f, nothing};
}

inline void encode_groups(const Lanes& a) {
  const int64_t size = a.cache.block_size;
  const float factor = hadamard_factor(a.dims);
  char* planes = a.own_params();
  hadamard_panel(a.dims, a.x, kChunkTokens);
  for (int64_t begin = 0; begin < a.dims; begin += kGroup, planes += 2 * size) {
    const int64_t end = begin + kGroup < a.dims ? begin + kGroup : a.dims;
    const GroupLanes group = group_of(a, begin, end, factor);
    store_bytes(planes, group.scale_code);
    store_bytes(planes + size, group.centre_code);
    put_words<4>(a, begin, end, [&](int64_t d) { return group.codes(a.at(d) * factor); });
  }
}

// Four words of bytes, eight of halves of bytes: rows and columns exchanged.
KVR_INLINE Vec<4>::U exchange_bytes(Vec<4>::U x) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  const Bytes y = (Bytes)x;
  return (Vec<4>::U)__builtin_shufflevector(y, y, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
}
KVR_INLINE Eight::U exchange_halves(Eight::U x) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  typedef uint16_t Pairs __attribute__((vector_size(16)));
  const Eight::U low = Eight::U{} + 0x0f0f0f0fu;
  const Eight::I odd{0, -1, 0, -1, 0, -1, 0, -1};
  const Eight::U beside = __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
  const Eight::U y = select(odd, (beside >> 4 & low) | (x & ~low), (x & low) | (beside & low) << 4);
  Bytes part[2];
  __builtin_memcpy(part, &y, 32);
  for (Bytes& p : part) p = __builtin_shufflevector(p, p, 0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
  const Pairs first = (Pairs)part[0], second = (Pairs)part[1];
  const Pairs out[2] = {__builtin_shufflevector(first, second, 0, 8, 1, 9, 2, 10, 3, 11),
                        __builtin_shufflevector(first, second, 4, 12, 5, 13, 6, 14, 7, 15)};
  return load<Eight::U>(out);
}

// The words of 16 values as those of keys, words[w * 16 + token], to where values have theirs.
inline void put_value_words(const CacheView& c, char* own, int64_t slot, const float* words) {
  const int64_t bits = bits_of(c.formats.v);
  char* to = own + v_codes(c) + slot * bits / 8 * c.v_dim;
  for (int64_t d = 0; d < c.v_dim; d += 32 / bits, words += kChunkTokens)
    if (bits == 4)
      for (int t = 0; t < kChunkTokens; t += 8)
        store(to + 4 * (t / 8 * c.v_dim + d), exchange_halves(load<Eight::U>(words + t)));
    else
      for (int t = 0; t < kChunkTokens; t += 4)
        store(to + 4 * (t / 4 * c.v_dim + d), exchange_bytes(load<Vec<4>::U>(words + t)));
}

inline void encode_lanes(const Lanes& a) {
  switch (a.key ? a.cache.formats.k : a.cache.formats.v) {
    case Format::kInt8: return encode_vectors<Format::kInt8>(a);
    case Format::kFP8: return encode_vectors<Format::kFP8>(a);
    case Format::kTurbo4: return encode_levels(a);
    default: return encode_groups(a);
  }
}

KVR_INLINE int64_t encode_chunk_floats(int64_t dims) { return dims * (kChunkTokens + kChunkTokens / 4); }

// Keys or values to slots `slot` ... slot + 15 of a unit, for formats with codes per token; x has
// encode_chunk_floats of scratch.
inline void encode_chunk(const CacheView& c, char* own, int64_t slot, bool key, const TokenRows& rows, float* x) {
  const int64_t dims = key ? c.k_dim : c.v_dim;
  const float* signs = !is_rotated(key ? c.formats.k : c.formats.v) ? nullptr : key ? c.k_signs : c.v_signs;
  float* words = x + dims * kChunkTokens;
  load_panel(rows, dims, x);
  for (int64_t i = 0; i < dims * kChunkTokens; i += kLanes) {
    const vf y = bounded(load<vf>(x + i));
    store(x + i, signs == nullptr ? y : y * signs[i / kChunkTokens]);
  }
  for (int t = 0; t < kChunkTokens; t += kLanes) {
    const Lanes values{c, own, slot + t, false, dims, x + t, reinterpret_cast<char*>(words + t), 4 * kChunkTokens};
    const Lanes keys{c, own, slot + t, true, dims, x + t, own + 4 * (slot + t), k_word_stride(c)};
    encode_lanes(key ? keys : values);
  }
  if (!key) put_value_words(c, own, slot, words);
}

}  // namespace kvreclaim::KVR_NS
#endif
