// How the numbers of a packed matrix lie, and how a vector of them is read: 16 weight rows by 32 columns at a time.
//
// A block is 16 weight rows; in it the columns follow each other in chunks of 32. A line is 64 bytes, 4 for each row
// of the block, so that lane r of a vector of words is row r. Word i of a chunk are its columns 4 i to 4 i + 3:
//
//   kNibble, kTable  4 lines; low and high nibbles of line l: words 2 l and 2 l + 1
//   kSix             2 times 3 lines, for 16 columns each: nibbles of words 0 and 1, of 2 and 3, then the two upper
//                    bits of word i in bits 2 i and 2 i + 1 of each byte
//   kByte            8 lines; line l: word l, signed
//
// What a number q stands for:
//
//   kScale   s (q - c)      c: 8 of kNibble, 32 of kSix, 0 of kByte; kTable: s table[q]
//   kZero    s (q - z)      z a byte
//   kMin     s q + m
//   kSuper   d a q - e b    kNibble with bytes a, b per 32 columns and d, e per 256 (GGUF's Q4_K)
//            d a (q - 32)   kSix with a signed byte a per 16 columns and d per 256 (GGUF's Q6_K)
#pragma once

#include <cstdint>

#include "kvreclaim/layout.h"

namespace kvreclaim {

enum class Codes : int { kNibble, kTable, kSix, kByte };
enum class Grid : int { kScale, kZero, kMin, kSuper };

constexpr int64_t kBlockRows = 16;     // of a packed matrix
constexpr int64_t kChunkCols = 32;
constexpr int64_t kSuperCols = 256;
constexpr int kLowBits = 7;            // of a number in two bytes,
constexpr int kHighUnit = 1 << kLowBits;  // the upper of which counts so many

constexpr int64_t lines_of(Codes codes) { return codes == Codes::kSix ? 6 : codes == Codes::kByte ? 8 : 4; }

// G: columns that share a scale. All arrays begin with a dim of blocks, and end with one of the block's 16 rows.
struct PackedMatrix {
  Codes codes;
  Grid grid;
  bool is_wide;         // scales and mins are fp32, not fp16
  int64_t out, in;      // N, K; K a multiple of 32, and of 256 for kSuper
  int64_t group;        // G, a multiple of 32; kSuper: 32, or 16 of kSix
  const char* data;     // [N / 16, K / 32, lines, 64]
  const char* scales;   // [N / 16, K / G, 16] fp16 or fp32; kSuper: [.., 2, 16] bytes a, b; kSix: [.., 16] signed bytes
  const char* offsets;  // kZero: [N / 16, K / G, 16] bytes; kMin: like scales; else null
  const char* supers;   // kSuper: [N / 16, K / 256, 2, 16] fp16 d, e; kSix: [N / 16, K / 256, 16]; else null
  float values[16];     // kTable: the numbers
  int8_t table[16];     // kTable: the numbers as multiples of `unit`, for products with x of 8 bits
  float unit;
  int8_t fine[2][16];   // kTable: as multiples of `fine_unit`, 128 fine[0] + fine[1], for products with x of 15 bits
  float fine_unit;
};

}  // namespace kvreclaim

#ifdef KVR_NS
#include "kvreclaim/half.h"
#include "kvreclaim/simd.h"

namespace kvreclaim::KVR_NS::packed_detail {

constexpr int64_t kLine = 64;
constexpr int kStrips = (int)kBlockRows / kLanes;  // vectors of a line

KVR_INLINE vf widen_halfs(const char* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(load<__m256i>(p));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(load<__m128i>(p));
#else
  vu words{};
  for (int i = 0; i < kLanes; ++i) words[i] = (uint32_t)load<uint16_t>(p + 2 * i) << 16;
  return widen_f16(words);
#endif
}

template <class Byte>
KVR_INLINE vf widen_bytes(const char* p) {
  typedef Byte Bytes __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(__builtin_convertvector(load<Bytes>(p), vi), vf);
}

KVR_INLINE vf numbers(const char* p, int64_t index, bool is_wide) {
  return is_wide ? load<vf>(p + index * 4) : widen_halfs(p + index * 2);
}

// w = scale * (q - centre) + offset for the columns of a chunk (kSix: of half a chunk).
struct Line {
  vf scale, offset;
};

// kSuper: d and -e of a strip's 256 columns.
template <Codes C, Grid G>
KVR_INLINE Line super_of(const PackedMatrix& m, int64_t block, int64_t col, int64_t lane) {
  if constexpr (G != Grid::kSuper) return {vf{}, vf{}};
  const int64_t at = block * (m.in / kSuperCols) + col / kSuperCols;
  if constexpr (C == Codes::kSix) return {widen_halfs(m.supers + (at * kBlockRows + lane) * 2), vf{}};
  return {widen_halfs(m.supers + (at * 2 * kBlockRows + lane) * 2),
          -widen_halfs(m.supers + ((at * 2 + 1) * kBlockRows + lane) * 2)};
}

// Of a strip and the group that column `col` is in; super: what super_of gives for it.
template <Codes C, Grid G>
KVR_INLINE Line line_of(const PackedMatrix& m, int64_t block, int64_t col, int64_t lane, const Line& super) {
  if constexpr (G == Grid::kSuper) {
    if constexpr (C == Codes::kSix)
      return {super.scale * widen_bytes<int8_t>(m.scales + (block * (m.in / 16) + col / 16) * kBlockRows + lane), vf{}};
    const char* bytes = m.scales + (block * (m.in / kChunkCols) + col / kChunkCols) * 2 * kBlockRows + lane;
    return {super.scale * widen_bytes<uint8_t>(bytes), super.offset * widen_bytes<uint8_t>(bytes + kBlockRows)};
  }
  const int64_t at = (block * (m.in / m.group) + col / m.group) * kBlockRows + lane;
  const vf scale = numbers(m.scales, at, m.is_wide);
  if constexpr (G == Grid::kMin) return {scale, numbers(m.offsets, at, m.is_wide)};
  return {scale, vf{}};
}

KVR_INLINE vf zeros_of(const PackedMatrix& m, int64_t block, int64_t col, int64_t lane) {
  return widen_bytes<uint8_t>(m.offsets + (block * (m.in / m.group) + col / m.group) * kBlockRows + lane);
}

// Bytes of word I of a chunk whose strip begins at p: unsigned, or signed of kByte.
template <Codes C, int I>
KVR_INLINE vu word_codes(const char* p) {
  if constexpr (C == Codes::kByte) return load<vu>(p + I * kLine);
  if constexpr (C == Codes::kSix) {
    const char* half = p + I / 4 * 3 * kLine;
    const vu low = load<vu>(half + I % 4 / 2 * kLine), high = load<vu>(half + 2 * kLine);
    constexpr int kUp = 4 - I % 4 * 2;
    const vu upper = kUp >= 0 ? high << (kUp >= 0 ? kUp : 0) : high >> (kUp < 0 ? -kUp : 0);
    return ((I % 2 ? low >> 4 : low) & 0x0f0f0f0fu) | (upper & 0x30303030u);
  }
  const vu line = load<vu>(p + I / 2 * kLine);
  return (I % 2 ? line >> 4 : line) & 0x0f0f0f0fu;
}

// Numbers of column J of a chunk as fp32, centred.
template <Codes C, int J>
KVR_INLINE vf column(const PackedMatrix& m, const char* p) {
  const vu codes = (word_codes<C, J / 4>(p) >> (J % 4 * 8)) & 0xffu;
  if constexpr (C == Codes::kTable) {
#if defined(__AVX512F__)
    return (vf)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(m.values));
#else
    vf x{};
    for (int i = 0; i < kLanes; ++i) x[i] = m.values[codes[i]];
    return x;
#endif
  }
  if constexpr (C == Codes::kByte) return __builtin_convertvector((vi)(codes << 24) >> 24, vf);
  return __builtin_convertvector((vi)codes, vf);
}

constexpr int centre_of(Codes codes, Grid grid) {
  if (codes == Codes::kSix) return 32;
  return codes == Codes::kNibble && grid == Grid::kScale ? 8 : 0;
}

// w[j], j < 32: the weights of a strip's chunk, as the format defines them in fp32.
template <Codes C, Grid G, int J = 0>
KVR_INLINE void weights_of(const PackedMatrix& m, int64_t block, int64_t col, int64_t lane, const char* p, vf* w,
                           Line line, vf centre) {
  if constexpr (C == Codes::kSix && J == 16)
    line = line_of<C, G>(m, block, col + 16, lane, super_of<C, G>(m, block, col, lane));
  w[J] = (column<C, J>(m, p) - centre) * line.scale;
  if constexpr (G == Grid::kMin || (G == Grid::kSuper && C == Codes::kNibble)) w[J] += line.offset;
  if constexpr (J + 1 < kChunkCols) weights_of<C, G, J + 1>(m, block, col, lane, p, w, line, centre);
}

template <Codes C, Grid G>
inline void chunk_weights(const PackedMatrix& m, int64_t block, int64_t chunk, int64_t lane, vf* w) {
  const int64_t col = chunk * kChunkCols;
  const char* p = m.data + (block * (m.in / kChunkCols) + chunk) * lines_of(C) * kLine + lane * 4;
  const vf centre = G == Grid::kZero ? zeros_of(m, block, col, lane) : splat((float)centre_of(C, G));
  const Line super = super_of<C, G>(m, block, col, lane);
  weights_of<C, G>(m, block, col, lane, p, w, line_of<C, G>(m, block, col, lane, super), centre);
}

// body.template operator()<Codes, Grid>() for the kinds that exist.
template <class Body>
inline void with_kind(const PackedMatrix& m, const Body& body) {
  switch (m.codes) {
    case Codes::kNibble:
      switch (m.grid) {
        case Grid::kScale: return body.template run<Codes::kNibble, Grid::kScale>();
        case Grid::kZero: return body.template run<Codes::kNibble, Grid::kZero>();
        case Grid::kMin: return body.template run<Codes::kNibble, Grid::kMin>();
        case Grid::kSuper: return body.template run<Codes::kNibble, Grid::kSuper>();
      }
      return;
    case Codes::kTable: return body.template run<Codes::kTable, Grid::kScale>();
    case Codes::kSix: return body.template run<Codes::kSix, Grid::kSuper>();
    case Codes::kByte: return body.template run<Codes::kByte, Grid::kScale>();
  }
}

}  // namespace kvreclaim::KVR_NS::packed_detail
#endif
