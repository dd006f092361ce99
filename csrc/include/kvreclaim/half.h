// fp16 without F16C.
#pragma once

#include "kvreclaim/simd.h"

namespace kvreclaim::KVR_NS {

// fp16 bits in the high half of each 32-bit lane (the low half is ignored) -> fp32, exact.
template <class U>
KVR_INLINE auto widen_f16(U words) {
  using V = Vec<sizeof(U) / 4>;
  const auto finite = (typename V::F)((typename V::U)((typename V::I)words >> 3) & 0x8fffe000u) * 0x1p112f;
  const auto other = (typename V::F)((typename V::U)finite | 0x7f800000u);  // 65536 and up: infinite or NaN
  return select((words & 0x7c000000u) == 0x7c000000u, other, finite);
}

KVR_INLINE float from_f16(uint16_t x) { return widen_f16(Vec<4>::U{} + ((uint32_t)x << 16))[0]; }

// To nearest even; what rounds to 2^16 or more becomes infinite, NaN stays NaN.
KVR_INLINE uint16_t to_f16(float x) {
  const uint32_t bits = load<uint32_t>(&x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (size >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (size < 0x38800000u) {  // below 2^-14: the sum's low bits are multiples of 2^-24
    const float sum = load_bits(size) + 0.5f;
    return (uint16_t)(sign | (load<uint32_t>(&sum) - 0x3f000000u));
  }
  return (uint16_t)(sign | (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13);
}

}  // namespace kvreclaim::KVR_NS
