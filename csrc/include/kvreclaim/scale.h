// Scales as logarithmic codes, rounded down, so that an error stays below half of the exact scale.
//
//   fine   (12 bits)  2^(c / 256 - bias)   int8, fp8, turboquant4
//   coarse ( 8 bits)  2^(c / 16 - 10)      int4, kivi4's keys
//   value  ( 8 bits)  2^(c / 22 - 8)       kivi4's values
//
// Each is one or two table entries and an exponent, so that every back-end decodes the same bits.
// Oracle: ops/formats/scales.py.
#pragma once

#include <cmath>

#include "kvreclaim/layout.h"
#include "kvreclaim/simd.h"

namespace kvreclaim::KVR_NS {

constexpr int kCoarseBias = 10, kValueBias = 8, kValueSteps = 22;
constexpr int fine_bias(Format format) { return format == Format::kInt8 ? 13 : format == Format::kFP8 ? 15 : 9; }

// fp32(2^(m / 16)), fp32(2^(m / 256)), fp32(2^(m / 22)).
alignas(64) constexpr float kSixteenths[16] = {
    0x1p+0f,        0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f, 0x1.306fep+0f,  0x1.3dea64p+0f,
    0x1.4bfdaep+0f, 0x1.5ab07ep+0f, 0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f,
    0x1.ae89fap+0f, 0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f};
alignas(64) constexpr float k256ths[16] = {
    0x1p+0f,        0x1.00b1bp+0f,  0x1.0163dap+0f, 0x1.021682p+0f, 0x1.02c9a4p+0f, 0x1.037d42p+0f,
    0x1.04315ep+0f, 0x1.04e5f8p+0f, 0x1.059b0ep+0f, 0x1.0650ap+0f,  0x1.0706b2p+0f, 0x1.07bd42p+0f,
    0x1.087452p+0f, 0x1.092bep+0f,  0x1.09e3ecp+0f, 0x1.0a9c7ap+0f};
constexpr float k22nds[22] = {
    0x1p+0f,         0x1.0831b2p+0f,  0x1.10a688p+0f,  0x1.1960aap+0f,  0x1.22624ep+0f,  0x1.2badcp+0f,
    0x1.35455ap+0f,  0x1.3f2b8ep+0f,  0x1.4962dep+0f,  0x1.53ede6p+0f,  0x1.5ecf52p+0f,  0x1.6a09e6p+0f,
    0x1.75a07cp+0f,  0x1.819608p+0f,  0x1.8ded92p+0f,  0x1.9aaa3ep+0f,  0x1.a7cf48p+0f,  0x1.b56006p+0f,
    0x1.c35feep+0f,  0x1.d1d28cp+0f,  0x1.e0bb8ep+0f,  0x1.f01ebcp+0f};

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
KVR_INLINE float value_scale(uint32_t code) {
  return k22nds[code % kValueSteps] * power_of_two((int)(code / kValueSteps) - kValueBias);
}

// floor(steps (log2(scale) + bias)), within [0, last]. The 2^-10 makes the code of a decoded scale the same code.
inline uint32_t scale_code(float scale, double steps, int bias, uint32_t last) {
  const double code = steps * (std::log2((double)scale) + bias) + 0x1p-10;
  if (!(code > 0)) return 0;
  return code < last ? (uint32_t)code : last;
}
inline uint32_t fine_code(float scale, int bias) { return scale_code(scale, 256, bias, 4095); }
inline uint32_t coarse_code(float scale, uint32_t last = 255) { return scale_code(scale, 16, kCoarseBias, last); }
inline uint32_t value_code(float scale) { return scale_code(scale, kValueSteps, kValueBias, 255); }

}  // namespace kvreclaim::KVR_NS
