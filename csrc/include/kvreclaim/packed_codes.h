// How the numbers of a packed matrix lie, and how a vector of them is read: 16 weight rows by 32 columns at a time.
//
// A block is 16 weight rows; in it the columns follow each other in chunks of 32. A line is 64 bytes, 4 for each row
// of the block, so that lane r of a vector of words is row r. Word i of a chunk are its columns 4 i to 4 i + 3:
//
//   kNibble, kTable  4 lines; low and high nibbles of line l: words 2 l and 2 l + 1
//   kSix             2 times 3 lines, for 16 columns each: nibbles of words 0 and 1, of 2 and 3, then the two upper
//                    bits of word i in bits 2 i and 2 i + 1 of each byte
//   kByte            8 lines; line l: word l, signed
//   kTwo             2 lines; line l: word 4 l + i in bits 2 i and 2 i + 1 of each byte
//   kThree           those of kTwo, then a line with the upper bit of word i in bit i of each byte
//   kFive            those of kNibble, then such a line
//
// What a number q stands for:
//
//   kScale   s (q - c)      c: the middle code, 0 of kByte; kTable: s table[q]
//   kZero    s (q - z)      z a byte
//   kMin     s q + m
//   kSuper   d a q - e b    bytes a, b per 32 columns, of kTwo per 16; d, e per 256 (GGUF's Q4_K, Q5_K, Q2_K)
//   kSigned  d a (q - c)    a signed byte a per 16 columns, d per 256 (GGUF's Q6_K, Q3_K)
#pragma once

#include <cstdint>

#include "kvreclaim/layout.h"

namespace kvreclaim {

enum class Codes : int { kNibble, kTable, kSix, kByte, kTwo, kThree, kFive };
enum class Grid : int { kScale, kZero, kMin, kSuper, kSigned };

constexpr int64_t kBlockRows = 16;     // of a packed matrix
constexpr int64_t kChunkCols = 32;
constexpr int64_t kSuperCols = 256;
constexpr int kLowBits = 7;            // of a number in two bytes,
constexpr int kHighUnit = 1 << kLowBits;  // the upper of which counts so many

// Lines of a chunk, and bits of a code.
constexpr int lines_of(Codes codes) {
  constexpr int kLines[] = {4, 4, 6, 8, 2, 3, 5};
  return kLines[(int)codes];
}

// kSuper, kSigned: columns that share bytes a, b.
constexpr int64_t small_group_of(Codes codes, Grid grid) {
  return grid == Grid::kSigned || codes == Codes::kTwo ? 16 : kChunkCols;
}

// G: columns that share a scale. All arrays begin with a dim of blocks, and end with one of the block's 16 rows.
struct PackedMatrix {
  Codes codes;
  Grid grid;
  bool is_wide;         // scales and mins are fp32, not fp16
  int64_t out, in;      // N, K; K a multiple of 32, and of 256 for kSuper and kSigned
  int64_t group;        // G, a multiple of 32; kSuper, kSigned: small_group_of
  const char* data;     // [N / 16, K / 32, lines, 64]
  const char* scales;   // [N / 16, K / G, 16] fp16 or fp32; kSuper: [.., 2, 16] bytes a, b; kSigned: signed bytes
  const char* offsets;  // kZero: [N / 16, K / G, 16] bytes; kMin: like scales; else null
  const char* supers;   // kSuper: [N / 16, K / 256, 2, 16] fp16 d, e; kSigned: [N / 16, K / 256, 16]; else null
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

KVR_INLINE vf widen_bytes(const char* p) { return __builtin_convertvector((vi)load_bytes(p), vf); }

KVR_INLINE vf numbers(const char* p, int64_t index, bool is_wide) {
  return is_wide ? load<vf>(p + index * 4) : widen_halfs(p + index * 2);
}

// w = scale * (q - centre) + offset for the columns of a chunk, or of half a chunk.
struct Line {
  vf scale, offset;
};

constexpr bool has_supers(Grid grid) { return grid == Grid::kSuper || grid == Grid::kSigned; }
constexpr bool has_offset(Grid grid) { return grid == Grid::kMin || grid == Grid::kSuper; }
constexpr bool has_halves(Codes codes, Grid grid) {
  return has_supers(grid) && small_group_of(codes, grid) < kChunkCols;
}

// d and -e of a strip's 256 columns.
template <Codes C, Grid G>
KVR_INLINE Line super_of(const PackedMatrix& m, int64_t block, int64_t col, int64_t lane) {
  if constexpr (!has_supers(G)) return {vf{}, vf{}};
  const int64_t at = block * (m.in / kSuperCols) + col / kSuperCols;
  if constexpr (G == Grid::kSigned) return {widen_halfs(m.supers + (at * kBlockRows + lane) * 2), vf{}};
  return {widen_halfs(m.supers + (at * 2 * kBlockRows + lane) * 2),
          -widen_halfs(m.supers + ((at * 2 + 1) * kBlockRows + lane) * 2)};
}

// Of a strip and the group that column `col` is in; super: what super_of gives for it.
template <Codes C, Grid G>
KVR_INLINE Line line_of(const PackedMatrix& m, int64_t block, int64_t col, int64_t lane, const Line& super) {
  if constexpr (has_supers(G)) {
    constexpr int64_t kGroup = small_group_of(C, G);
    const int64_t at = block * (m.in / kGroup) + col / kGroup;
    if constexpr (G == Grid::kSigned)
      return {super.scale * __builtin_convertvector(load_signed_bytes(m.scales + at * kBlockRows + lane), vf), vf{}};
    const char* bytes = m.scales + at * 2 * kBlockRows + lane;
    return {super.scale * widen_bytes(bytes), super.offset * widen_bytes(bytes + kBlockRows)};
  }
  const int64_t at = (block * (m.in / m.group) + col / m.group) * kBlockRows + lane;
  const vf scale = numbers(m.scales, at, m.is_wide);
  if constexpr (G == Grid::kMin) return {scale, numbers(m.offsets, at, m.is_wide)};
  return {scale, vf{}};
}

KVR_INLINE vf zeros_of(const PackedMatrix& m, int64_t block, int64_t col, int64_t lane) {
  return widen_bytes(m.offsets + (block * (m.in / m.group) + col / m.group) * kBlockRows + lane);
}

// The I-th field of kBits bits in each byte of lines that begin at p, moved up to bit kTo.
template <int kBits, int I, int kTo = 0>
KVR_INLINE vu field(const char* p) {
  constexpr int kDown = I * kBits % 8 - kTo;
  const vu line = load<vu>(p + I * kBits / 8 * kLine);
  return (kDown > 0 ? line >> (kDown > 0 ? kDown : 0) : line << (kDown < 0 ? -kDown : 0)) &
         0x01010101u * (((1u << kBits) - 1) << kTo);
}

// Bytes of word I of a chunk whose strip begins at p: unsigned, or signed of kByte.
template <Codes C, int I>
KVR_INLINE vu word_codes(const char* p) {
  if constexpr (C == Codes::kByte) return load<vu>(p + I * kLine);
  if constexpr (C == Codes::kTwo) return field<2, I>(p);
  if constexpr (C == Codes::kThree) return field<2, I>(p) | field<1, I, 2>(p + 2 * kLine);
  if constexpr (C == Codes::kFive) return field<4, I>(p) | field<1, I, 4>(p + 4 * kLine);
  if constexpr (C == Codes::kSix) {
    const char* half = p + I / 4 * 3 * kLine;
    return field<4, I % 4>(half) | field<2, I % 4, 4>(half + 2 * kLine);
  }
  return field<4, I>(p);
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
  const bool is_centred = grid == Grid::kScale || grid == Grid::kSigned;
  return !is_centred || codes == Codes::kTable || codes == Codes::kByte ? 0 : 1 << (lines_of(codes) - 1);
}

// w[j], j < 32: the weights of a strip's chunk, as the format defines them in fp32.
template <Codes C, Grid G, int J = 0>
KVR_INLINE void weights_of(const PackedMatrix& m, int64_t block, int64_t col, int64_t lane, const char* p, vf* w,
                           Line line, vf centre) {
  if constexpr (has_halves(C, G) && J == 16)
    line = line_of<C, G>(m, block, col + 16, lane, super_of<C, G>(m, block, col, lane));
  w[J] = (column<C, J>(m, p) - centre) * line.scale;
  if constexpr (has_offset(G)) w[J] += line.offset;
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
        case Grid::kSigned: return;
      }
      return;
    case Codes::kTable: return body.template run<Codes::kTable, Grid::kScale>();
    case Codes::kSix: return body.template run<Codes::kSix, Grid::kSigned>();
    case Codes::kByte: return body.template run<Codes::kByte, Grid::kScale>();
    case Codes::kTwo: return body.template run<Codes::kTwo, Grid::kSuper>();
    case Codes::kThree: return body.template run<Codes::kThree, Grid::kSigned>();
    case Codes::kFive:
      if (m.grid == Grid::kScale) return body.template run<Codes::kFive, Grid::kScale>();
      if (m.grid == Grid::kMin) return body.template run<Codes::kFive, Grid::kMin>();
      return body.template run<Codes::kFive, Grid::kSuper>();
  }
}

}  // namespace kvreclaim::KVR_NS::packed_detail
#endif
