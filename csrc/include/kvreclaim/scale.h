// Scales as logarithmic codes, rounded down, so that an error stays below half of the exact scale.
//
//   fine   (12 bits)  2^(c / 256 - bias)   int8, fp8, turboquant4
//   coarse ( 8 bits)  2^(c / 16 - 10)      int4
//
// Each is one or two table entries and an exponent, so that every back-end decodes the same bits.
// Oracle: ops/formats/scales.py.
#pragma once

#include <cmath>

#include "kvreclaim/layout.h"
#include "kvreclaim/simd.h"

namespace kvreclaim::KVR_NS {

constexpr int kCoarseBias = 10;
constexpr int fine_bias(Format format) { return format == Format::kInt8 ? 13 : format == Format::kFP8 ? 15 : 9; }

// fp32(2^(m / 16)), fp32(2^(m / 256)).
alignas(64) constexpr float kSixteenths[16] = {
    0x1p+0f,        0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f, 0x1.306fep+0f,  0x1.3dea64p+0f,
    0x1.4bfdaep+0f, 0x1.5ab07ep+0f, 0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f,
    0x1.ae89fap+0f, 0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f};
alignas(64) constexpr float k256ths[16] = {
    0x1p+0f,        0x1.00b1bp+0f,  0x1.0163dap+0f, 0x1.021682p+0f, 0x1.02c9a4p+0f, 0x1.037d42p+0f,
    0x1.04315ep+0f, 0x1.04e5f8p+0f, 0x1.059b0ep+0f, 0x1.0650ap+0f,  0x1.0706b2p+0f, 0x1.07bd42p+0f,
    0x1.087452p+0f, 0x1.092bep+0f,  0x1.09e3ecp+0f, 0x1.0a9c7ap+0f};
// 2^e for e in [-126, 127].
KVR_INLINE float power_of_two(int e) { return load_bits((uint32_t)(e + 127) << 23); }
template <class I>
KVR_INLINE auto powers_of_two(I e) {
  return (typename Vec<sizeof(I) / 4>::F)((e + 127) << 23);
}

// table[index & 15] per lane.
KVR_INLINE vf lookup16(const float* table, vu index) {
#if defined(__AVX512F__)
  return (vf)_mm512_permutexvar_ps((__m512i)index, (__m512)load<vf>(table));
#elif defined(__AVX2__)
  const __m256 low = _mm256_permutevar8x32_ps((__m256)load<vf>(table), (__m256i)index);
  const __m256 high = _mm256_permutevar8x32_ps((__m256)load<vf>(table + 8), (__m256i)index);
  return (vf)_mm256_blendv_ps(low, high, (__m256)(index << 28));
#else
  vf out;
  for (int i = 0; i < kLanes; ++i) out[i] = table[index[i] & 15];
  return out;
#endif
}

// table[index] per lane.
KVR_INLINE vu gather(const void* table, vu index) {
#if defined(__AVX512F__)
  return (vu)_mm512_i32gather_epi32((__m512i)index, table, 4);
#elif defined(__AVX2__)
  return (vu)_mm256_i32gather_epi32(reinterpret_cast<const int*>(table), (__m256i)index, 4);
#else
  vu out;
  for (int i = 0; i < kLanes; ++i) out[i] = reinterpret_cast<const uint32_t*>(table)[index[i]];
  return out;
#endif
}

KVR_INLINE vf fine(vu code, int bias) {
  return lookup16(kSixteenths, code >> 4) * lookup16(k256ths, code) * powers_of_two((vi)(code >> 8) - bias);
}
KVR_INLINE vf coarse(vu code) {
  return lookup16(kSixteenths, code) * powers_of_two((vi)(code >> 4) - kCoarseBias);
}

KVR_INLINE float fine(uint32_t code, int bias) {
  return kSixteenths[code >> 4 & 15] * k256ths[code & 15] * power_of_two((int)(code >> 8) - bias);
}
KVR_INLINE float coarse(uint32_t code) {
  return kSixteenths[code & 15] * power_of_two((int)(code >> 4) - kCoarseBias);
}

// 2^x for x in [0, 1], to about 1e-16.
constexpr double power_of(double x) {
  double sum = 1, term = 1;
  for (int i = 1; i < 30; ++i) term *= x * 0.6931471805599453094 / i, sum += term;
  return sum;
}

// An octave's steps by the 23 bits of a mantissa m in place of a logarithm: floor(Steps log2(m) + 2^-10). The 2^-10
// makes the code of a decoded scale the same code.
template <int Steps>
struct Octave {
  uint32_t least[Steps + 3] = {};  // the smallest mantissa of each step; 2^23, which none has, past the last one
  uint32_t first[256] = {};        // the step of the mantissa that is i / 256; up to two more begin before the next

  constexpr Octave() {
    for (int i = 0; i < Steps + 3; ++i) {
      const double mantissa = i > Steps ? 1 : i == 0 ? 0 : power_of((i - 0x1p-10) / Steps) - 1;
      least[i] = (uint32_t)(mantissa * 0x1p23);
      if (least[i] < mantissa * 0x1p23) ++least[i];
    }
    for (uint32_t i = 0, step = 0; i < 256; first[i++] = step)
      while (least[step + 1] <= i << 15) ++step;
  }
};
template <int Steps>
constexpr Octave<Steps> kOctave{};

// floor(Steps (log2(scale) + bias)), within [0, last], of scales that are no NaN.
template <int Steps>
KVR_INLINE vu scale_codes(vf scale, int bias, int last) {
  const vu bits = (vu)scale & 0x7fffffffu, mantissa = bits & 0x7fffffu;
  const vu first = gather(kOctave<Steps>.first, mantissa >> 15);
  const vi second = (vi)mantissa >= (vi)gather(kOctave<Steps>.least, first + 1u);
  const vi third = (vi)mantissa >= (vi)gather(kOctave<Steps>.least, first + 2u);
  const vi code = ((vi)(bits >> 23) - 127 + bias) * Steps + (vi)first - second - third;
  const vi above = select(code > 0, code, vi{});
  return (vu)select(above < last, above, splat_i(last));
}
template <int Steps>
inline uint32_t scale_code(float scale, int bias, int last) {
  const uint32_t bits = load<uint32_t>(&scale) & 0x7fffffffu, mantissa = bits & 0x7fffffu;
  uint32_t step = kOctave<Steps>.first[mantissa >> 15];
  while (mantissa >= kOctave<Steps>.least[step + 1]) ++step;
  const int code = ((int)(bits >> 23) - 127 + bias) * Steps + (int)step;
  return code < 0 ? 0 : code < last ? code : last;
}
inline uint32_t fine_code(float scale, int bias) { return scale_code<256>(scale, bias, 4095); }
inline uint32_t coarse_code(float scale) { return scale_code<16>(scale, kCoarseBias, 255); }
KVR_INLINE vu fine_codes(vf scale, int bias) { return scale_codes<256>(scale, bias, 4095); }
KVR_INLINE vu coarse_codes(vf scale) { return scale_codes<16>(scale, kCoarseBias, 255); }

}  // namespace kvreclaim::KVR_NS
