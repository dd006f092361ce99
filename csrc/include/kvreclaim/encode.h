// One token's key or value as codes and a scale. A NaN is written as 0, numbers beyond 1e30 are cut.
// Oracle: ops/formats/codecs.py; equal codes, but for ties that a sum's order decides (turboquant4).
#pragma once

#include "kvreclaim/layout.h"

#ifdef KVR_NS
#include "kvreclaim/decode.h"
#include "kvreclaim/rotate.h"
#include "kvreclaim/scale.h"

namespace kvreclaim::KVR_NS {

constexpr float kLargest = 1e30f;
using Eight = Vec<8>;  // dims come in eights

template <class V>
KVR_INLINE V clamp(V x, float low, float high) {
  return vmax(splat<V>(low), vmin(splat<V>(high), x));
}

template <class V>
KVR_INLINE V bounded(V x) {
  return clamp(select(x == x, x, V{}), -kLargest, kLargest);
}
KVR_INLINE Eight::F load_finite(const float* x) { return bounded(load<Eight::F>(x)); }

// To nearest even, |x| < 2^22.
template <class V>
KVR_INLINE V round_even(V x) {
  const V magic = splat<V>(12582912.0f);
  return (x + magic) - magic;
}

template <class V>
KVR_INLINE auto to_codes(V x) {
  using I = typename Vec<sizeof(V) / 4>::I;
  return (typename Vec<sizeof(V) / 4>::U) __builtin_convertvector(x, I);
}

struct Range {
  float low, high;
};

inline Range range_of(const float* x, int64_t count) {
  Eight::F low = load_finite(x), high = low;
  for (int64_t d = 8; d < count; d += 8) {
    const Eight::F y = load_finite(x + d);
    low = vmin(low, y), high = vmax(high, y);
  }
  return {-hmax(-low), hmax(high)};
}

inline float greatest_size(const float* x, int64_t count) {
  const Range r = range_of(x, count);
  return r.high > -r.low ? r.high : -r.low;
}

inline float root_mean_square(const float* x, int64_t count) {
  Eight::F sum{};
  for (int64_t d = 0; d < count; d += 8) sum += load_finite(x + d) * load_finite(x + d);
  return std::sqrt(hsum(sum)) / std::sqrt((float)count);
}

// OCP E4M3, to nearest even, |x| <= 448.
template <class V>
KVR_INLINE auto fp8_codes(V x) {
  using U = typename Vec<sizeof(V) / 4>::U;
  const U bits = (U)x, size = bits & 0x7fffffffu;
  const U normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - 960u;
  const U small = (U)((V)size * 512.0f + 8388608.0f) - 0x4b000000u;
  return select(size < 0x3c800000u, small, normal) | (bits >> 24 & 128u);
}

KVR_INLINE Eight::U nearest_levels(Eight::F x) {
  Eight::I above{};
  for (int i = 0; i < 15; ++i) above -= x > (kLevels[i + 1] + kLevels[i]) / 2.0f;
  return (Eight::U)above;
}

// Where a token's codes go.
struct Place {
  const CacheView& cache;
  char* own;  // the unit
  int64_t slot;
  bool key;
};

KVR_INLINE Format format_of(const Place& at) { return at.key ? at.cache.formats.k : at.cache.formats.v; }

// First plane of its own parameters.
KVR_INLINE char* own_params(const Place& at) {
  const CacheView& c = at.cache;
  return at.own + params(c) + (at.key ? 0 : v_plane(c) * c.block_size) + at.slot;
}

// The codes of dims d ... d + 7.
KVR_INLINE void put_codes(const Place& at, int64_t d, Eight::U codes) {
  const CacheView& c = at.cache;
  const int bits = (int)bits_of(format_of(at));
  if (!at.key) {  // one field of eight words
    const int64_t shift = at.slot * bits % 32;
    char* words = at.own + v_codes(c) + 4 * (at.slot * bits / 32 * c.v_dim + d);
    const uint32_t field = ((1u << bits) - 1u) << shift;
    store(words, (load<Eight::U>(words) & ~field) | codes << (int)shift);
    return;
  }
  typedef uint8_t Bytes __attribute__((vector_size(8)));
  uint64_t bytes = (uint64_t) __builtin_convertvector(codes, Bytes);
  char* word = at.own + (d * bits / 32) * k_word_stride(c) + 4 * at.slot;
  if (bits == 4) {  // the low halves of the bytes move together
    bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ffu;
    bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffu;
    store(word, (uint32_t)(bytes | bytes >> 16));
    return;
  }
  store(word, (uint32_t)bytes);
  store(word + k_word_stride(c), (uint32_t)(bytes >> 32));
}

inline void put_fine(const Place& at, uint32_t code) {
  const CacheView& c = at.cache;
  *own_params(at) = (char)code;
  char& high = at.own[params(c) + high_plane(c) * c.block_size + at.slot];
  high = (char)(at.key ? (high & 0xf0) | code >> 8 : (high & 0x0f) | code >> 8 << 4);
}

// One scale for all dims: int8 and fp8.
inline void encode_vector(const Place& at, const float* x, int64_t dims) {
  const Format format = format_of(at);
  const float most = format == Format::kInt8 ? 127.0f : 448.0f;
  const uint32_t code = fine_code(greatest_size(x, dims) / most, fine_bias(format));
  const float scale = fine(code, fine_bias(format));
  put_fine(at, code);
  for (int64_t d = 0; d < dims; d += 8) {
    const Eight::F y = clamp(load_finite(x + d) / scale, -most, most);
    put_codes(at, d, format == Format::kInt8 ? to_codes(round_even(y) + 128.0f) : fp8_codes(y));
  }
}

inline void rotate_finite(const Place& at, float* x, int64_t dims) {
  for (int64_t d = 0; d < dims; d += 8) store(x + d, load_finite(x + d));
  rotate_row(at.key ? at.cache.k_signs : at.cache.v_signs, dims, x);
}

// turboquant4; x is rotated in place.
inline void encode_levels(const Place& at, float* x, int64_t dims) {
  const float size = root_mean_square(x, dims);
  const uint32_t found = fine_code(size, fine_bias(Format::kTurbo4));
  const uint32_t code = size == 0 ? 0 : found == 0 ? 1 : found;
  const float scale = fine(code, fine_bias(Format::kTurbo4));
  put_fine(at, code);
  rotate_finite(at, x, dims);
  for (int64_t d = 0; d < dims; d += 8) put_codes(at, d, nearest_levels(load<Eight::F>(x + d) / scale));
}

// int4's groups of at most 32 dims, each with a scale and a centre in thirds of it.
inline void encode_group(const Place& at, const float* x, int64_t begin, int64_t count) {
  const CacheView& c = at.cache;
  char* planes = own_params(at) + 2 * (begin / kGroup) * c.block_size;
  const Range r = range_of(x, count);
  const bool nothing = r.low == 0 && r.high == 0;
  const float centre = (r.low + r.high) / 2.0f, size = std::fabs(centre) / 40.5f, ideal = (r.high - r.low) / 15.0f;
  const uint32_t code = nothing ? 0 : coarse_code(ideal > size ? ideal : size);
  const float scale = coarse(code);
  // Equal numbers have no code at their centre: they take the one half a step beside it.
  const float beside = r.low != r.high ? 0.0f : r.low < 0 ? -0.5f : 0.5f;
  const Eight::F wanted = splat<Eight::F>(3.0f * (centre / scale - beside));
  const float z = nothing ? -128.0f : round_even(clamp(wanted, -127.0f, 127.0f))[0];
  const float first = z / 3.0f - 7.5f;
  planes[0] = (char)code;
  planes[c.block_size] = (char)(int)(z + 128.0f);
  for (int64_t d = 0; d < count; d += 8) {
    const Eight::F y = load_finite(x + d) / scale - first;
    put_codes(at, begin + d, nothing ? Eight::U{} : to_codes(round_even(clamp(y, 0.0f, 15.0f))));
  }
}

inline void encode_dims(const Place& at, float* x, int64_t dims) {
  switch (format_of(at)) {
    case Format::kInt4:
      rotate_finite(at, x, dims);
      for (int64_t d = 0; d < dims; d += kGroup) encode_group(at, x + d, d, dims - d < kGroup ? dims - d : kGroup);
      return;
    case Format::kTurbo4: return encode_levels(at, x, dims);
    default: return encode_vector(at, x, dims);
  }
}

// One token's key [D], value [Dv] into slot `slot` of a unit, for formats with codes per token. A value shares
// its words with the slots beside it, so a unit has one writer. x is overwritten.
inline void encode_key(const CacheView& c, char* own, int64_t slot, float* x) {
  encode_dims({c, own, slot, true}, x, c.k_dim);
}
inline void encode_value(const CacheView& c, char* own, int64_t slot, float* x) {
  encode_dims({c, own, slot, false}, x, c.v_dim);
}

}  // namespace kvreclaim::KVR_NS
#endif
