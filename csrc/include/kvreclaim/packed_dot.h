// Products of four bytes of packed weights with four of x, summed to the word that they make up.
#pragma once

#include "kvreclaim/packed_codes.h"

#ifdef KVR_NS
namespace kvreclaim::KVR_NS::packed_detail {

// sum + codes . x, lane by lane over the bytes of a word: codes are unsigned and at most 63, x is four signed bytes
// (not -128) for all lanes. Integers, so the result is the same whatever the instructions are.
KVR_INLINE vi dot_small(vi sum, vu codes, const int32_t* x) {
#if defined(__AVX512VNNI__)
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*x));
  return sum;
#elif defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(*x));
  return sum + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(*x));
  return sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int j = 0; j < 4; ++j) sum += (vi)((codes >> (8 * j)) & 0xffu) * splat_i((int32_t)((uint32_t)*x << (24 - 8 * j)) >> 24);
  return sum;
#endif
}

// The same of signed codes, less kSignedBias times the sum of x's bytes, which the caller adds first.
#if defined(__AVX512VNNI__)
constexpr int kSignedBias = 128;
#else
constexpr int kSignedBias = 0;
#endif

KVR_INLINE vi dot_signed(vi sum, vu codes, const int32_t* x) {
#if defined(__AVX512VNNI__)
  return dot_small(sum, codes ^ 0x80808080u, x);
#elif defined(__AVX512BW__)
  const __m512i w = (__m512i)codes, values = _mm512_set1_epi32(*x);
  const __m512i turned = _mm512_mask_sub_epi8(values, _mm512_movepi8_mask(w), _mm512_setzero_si512(), values);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), turned);
  return sum + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i w = (__m256i)codes, turned = _mm256_sign_epi8(_mm256_set1_epi32(*x), w);
  return sum + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), turned), _mm256_set1_epi16(1));
#else
  for (int j = 0; j < 4; ++j)
    sum += ((vi)(codes << (24 - 8 * j)) >> 24) * splat_i((int32_t)((uint32_t)*x << (24 - 8 * j)) >> 24);
  return sum;
#endif
}

// The 16 bytes of a table at each byte of codes, which are below 16.
KVR_INLINE vu look_up(const int8_t* table, vu codes) {
#if defined(__AVX512BW__)
  return (vu)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), (__m512i)codes);
#elif defined(__AVX2__)
  return (vu)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)codes);
#else
  for (int i = 0; i < kLanes; ++i) {
    uint32_t word = 0;
    for (int j = 0; j < 4; ++j) word |= (uint32_t)(uint8_t)table[codes[i] >> (8 * j) & 15] << (8 * j);
    codes[i] = word;
  }
  return codes;
#endif
}

// Word I of a chunk times x.
template <Codes C, int I>
KVR_INLINE vi dot(vi sum, vu codes, const int32_t* x) {
  return C == Codes::kByte || C == Codes::kTable ? dot_signed(sum, codes, x) : dot_small(sum, codes, x);
}

}  // namespace kvreclaim::KVR_NS::packed_detail
#endif
