// What decode attention by integer products (integer.h) reads of a coded cache: where a tile's words and parameters
// lie, codes as bytes, scales of sixteen tokens at a time.
#pragma once

#if defined(__AVX512VNNI__)
#include "kvreclaim/decode.h"
#include "kvreclaim/item.h"
#include "kvreclaim/scale.h"

namespace kvreclaim::KVR_NS {

constexpr int64_t kMaxIntegerDims = 256;  // a score over more could leave 32 bits
constexpr int kPlane = (int)kMaxIntegerDims / 4;  // words of a row's high, and then low, bytes of q
constexpr int kMaxIntegerGroups = (int)(kMaxIntegerDims / kGroup);
constexpr float kLargestInt16 = 127 * 256 + 127;  // of 16-bit numbers whose high byte stays below 128
using Words = __m512i;

// Groups of dims that share a scale.
constexpr int64_t scale_groups(Format f, int64_t dims) { return has_groups(f) ? groups_of(dims) : 1; }

// A number is unit (code + offset), before its scale; turboquant4's levels are whole ten-thousandths, of two bytes.
constexpr int kLevelOffset = 27326;
constexpr bool has_two_bytes(Format f) { return f == Format::kTurbo4; }
constexpr float code_offset(Format f) { return f == Format::kTurbo4 ? -(float)kLevelOffset : -128.0f; }
constexpr float code_unit(Format f) { return f == Format::kTurbo4 ? 1e-4f : 1.0f; }

struct LevelBytes {
  alignas(16) uint8_t high[16], low[16];

  constexpr LevelBytes() : high{}, low{} {
    for (int i = 0; i < 16; ++i) {
      const int code = kLevelOffset + (int)(kLevels[i] * 1e4f + (kLevels[i] < 0 ? -0.5f : 0.5f));
      high[i] = (uint8_t)(code >> 8), low[i] = (uint8_t)code;
    }
  }
};
constexpr LevelBytes kLevelBytes;

// Addresses of a tile's four chunks: first word row of keys and values, first plane of parameters.
struct CodedTile {
  const char *k[kChunks], *v[kChunks], *p[kChunks];
};

// Where the tiles of an item lie.
struct CodedItem {
  const char* units;  // of block 0
  int64_t block_bytes, k_stride, v_stride, plane;
  int64_t v_codes, params, v_row_bytes;
  int64_t v_params, high;  // from a tile's first plane to the values' first one and to the scales' upper bits
  int64_t k_words, k_groups, v_groups, v_dim;
};

inline CodedItem coded_item(const AttentionArgs& a, const Item& item) {
  const CacheView& c = a.cache;
  return {unit(c, a.layer, 0, item.head), unit_bytes(c) * c.heads, k_word_stride(c), 4 * c.v_dim, c.block_size,
          v_codes(c), params(c), c.v_dim * bits_of(c.formats.v) / 8, v_plane(c) * c.block_size,
          high_plane(c) * c.block_size, k_words(c), scale_groups(c.formats.k, c.k_dim),
          scale_groups(c.formats.v, c.v_dim), c.v_dim};
}

inline void open_coded(const AttentionArgs& a, const Item& item, const CodedItem& at_block, int64_t at,
                       CodedTile& tile) {
  const uint64_t size = (uint64_t)a.cache.block_size;
  const int shift = size & (size - 1) ? -1 : __builtin_ctzll(size);
  for (int c = 0; c < kChunks; ++c) {
    const int64_t slot = smaller(at + c * kChunk, (item.high - 1) / kChunk * kChunk);
    const int64_t index = shift >= 0 ? slot >> shift : slot / (int64_t)size, offset = slot - index * (int64_t)size;
    const char* own = at_block.units + item.seq.block_ids[index] * at_block.block_bytes;
    tile.k[c] = own + 4 * offset;
    tile.v[c] = own + at_block.v_codes + offset * at_block.v_row_bytes;
    tile.p[c] = own + at_block.params + offset;
  }
}

// Byte vectors of a word row of codes: all of it (8 bits), or the numbers at even and at odd places (4 bits).
template <Format F, int Odd>
KVR_INLINE Words codes_of(Words x) {
  if constexpr (bits_of(F) == 8) return x;
  return _mm512_and_si512(Odd ? _mm512_srli_epi32(x, 4) : x, _mm512_set1_epi8(15));
}

// A 4-bit code's byte of a table.
KVR_INLINE Words look_up(const uint8_t* table, Words codes) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), codes);
}

// The numbers of eight tokens or dims that share a word of 4-bit codes: even places, then odd ones.
KVR_INLINE Words evens_first(Words x) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15), x);
}

KVR_INLINE Words bytes_at(const char* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }

// fine() and coarse() of scale.h with the octave or-ed into the exponent: tables in units of 2^-15.
struct ScaleTables {
  Words sixteenths;
  vf steps;  // 2^(m/256), and the bias of the format
};

template <Format F>
KVR_INLINE ScaleTables scale_tables() {
  return {_mm512_sub_epi32(_mm512_load_si512(kSixteenths), _mm512_set1_epi32(15 << 23)),
          load<vf>(k256ths) * power_of_two(15 - fine_bias(F))};
}
constexpr float kCoarseUnit = 32;  // 2^(15 - kCoarseBias)

KVR_INLINE Words with_octave(Words table, Words octave_bits) {  // table | (octave_bits & 15 << 23)
  return _mm512_ternarylogic_epi32(octave_bits, _mm512_set1_epi32(15 << 23), table, 0xEA);
}

// Scales of keys (Side 0) or values (1) of formats with one for all dims, from the planes of lower and of upper bits.
template <Format F, int Side>
KVR_INLINE vf fine_scale(const char* lower, const char* upper, const ScaleTables& tables) {
  const Words low = bytes_at(lower), high = bytes_at(upper);
  const Words octave = _mm512_slli_epi32(high, Side == 0 ? 23 : 19);
  Words bits = with_octave(_mm512_permutexvar_epi32(_mm512_srli_epi32(low, 4), tables.sixteenths), octave);
  if constexpr (F == Format::kTurbo4) {  // code 0 stands for zeros
    const Words own = _mm512_and_si512(high, _mm512_set1_epi32(Side == 0 ? 15 : 240)), code = _mm512_or_si512(low, own);
    bits = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(code, code), bits);
  }
  return (vf)bits * (vf)_mm512_permutexvar_ps(low, (__m512)tables.steps);
}

// A group's scale, and what joins the codes. int4's scale is in units of 1 / kCoarseUnit.
struct GroupParams {
  vf scale, first;
};

KVR_INLINE GroupParams int4_params(const char* planes, int64_t plane, const ScaleTables& tables) {
  const Words code = bytes_at(planes), centre = bytes_at(planes + plane);
  const __mmask16 live = _mm512_test_epi32_mask(centre, centre);
  const Words bits = _mm512_maskz_ternarylogic_epi32(  // with_octave
      live, _mm512_slli_epi32(code, 19), _mm512_set1_epi32(15 << 23),
      _mm512_permutexvar_epi32(code, tables.sixteenths), 0xEA);
  return {(vf)bits, (vf)_mm512_cvtepi32_ps(centre) * (1.0f / 3.0f) - (128.0f / 3.0f + 7.5f)};
}

// First plane of a group's value parameters, from tile.p on.
KVR_INLINE int64_t value_plane(const CodedItem& at, int64_t g) { return at.v_params + 2 * g * at.plane; }

template <Format F>
KVR_INLINE GroupParams value_params(const CodedItem& at, const CodedTile& tile, int c, int64_t g,
                                    const ScaleTables& tables) {
  if constexpr (has_groups(F)) return int4_params(tile.p[c] + value_plane(at, g), at.plane, tables);
  return {fine_scale<F, 1>(tile.p[c] + at.v_params, tile.p[c] + at.high, tables), vf{}};
}

// The greatest byte among the tile's visible tokens, `offset` bytes behind each chunk's `from`.
KVR_INLINE int greatest_byte(const char* const* from, int64_t offset, uint64_t seen) {
  __m128i most = _mm_setzero_si128();
#pragma GCC unroll 4
  for (int c = 0; c < kChunks; ++c)
    most = _mm_max_epu8(most, _mm_maskz_loadu_epi8((__mmask16)(seen >> (16 * c)), from[c] + offset));
  most = _mm_max_epu8(most, _mm_srli_epi16(most, 8));  // of each pair in its low byte
  const __m128i least = _mm_minpos_epu16(_mm_andnot_si128(most, _mm_set1_epi16(255)));
  return 255 - _mm_cvtsi128_si32(least) % 256;
}

// The exponent of a bound of the scales of a group's values over the tile's visible tokens.
template <Format F>
KVR_INLINE int scale_bound(const CodedItem& at, const CodedTile& tile, int64_t g, uint64_t seen) {
  const int octave = greatest_byte(tile.p, has_groups(F) ? value_plane(at, g) : at.high, seen) >> 4;
  return octave + 1 - (has_groups(F) ? 15 : fine_bias(F));
}

}  // namespace kvreclaim::KVR_NS
#endif
