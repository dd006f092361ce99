// Vectors of the instruction set this translation unit is compiled for, written with the vector
// extensions of GCC and clang. Every function lives in namespace kvreclaim::KVR_NS (one name per
// instruction set), so that the linker never mixes code of two instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef KVR_NS
#error "KVR_NS names the instruction set's namespace; src/kernels.cpp sets it"
#endif

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#define KVR_INLINE inline __attribute__((always_inline))
// For inner loops that need all registers: inlined elsewhere, GCC spills their accumulators.
#define KVR_KERNEL inline __attribute__((noinline))

namespace kvreclaim::KVR_NS {

#if defined(__AVX512F__)
constexpr int kLanes = 16;  // 32-bit lanes of a vector
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kRegisters = 32;
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
#endif

// Vectors of N 32-bit lanes; N may be smaller than kLanes for the rest of a row.
template <int N>
struct Vec {
  typedef float F __attribute__((vector_size(4 * N)));
  typedef int32_t I __attribute__((vector_size(4 * N)));
  typedef uint32_t U __attribute__((vector_size(4 * N)));
};
using vf = Vec<kLanes>::F;
using vi = Vec<kLanes>::I;
using vu = Vec<kLanes>::U;

// Unaligned loads and stores of any vector type: load<vf>(p).
template <class V>
KVR_INLINE V load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

template <class V>
KVR_INLINE void store(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

// A vector's worth of bytes, one a lane; by name, because GCC makes scalar code of such a conversion.
KVR_INLINE vu load_bytes(const void* p) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu8_epi32(load<__m128i>(p));
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load<int64_t>(p)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(load<Bytes>(p), vu);
#endif
}

KVR_INLINE vi load_signed_bytes(const void* p) { return (vi)(load_bytes(p) << 24) >> 24; }

// The low byte of each lane.
KVR_INLINE void store_bytes(void* p, vu x) {
#if defined(__AVX512F__)
  store(p, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(__AVX2__)
  const __m256i low = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0c080400));
  const __m128i a = _mm256_castsi256_si128(low), b = _mm256_extracti128_si256(low, 1);
  store(p, _mm_cvtsi128_si64(_mm_unpacklo_epi32(a, b)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  store(p, __builtin_convertvector(x, Bytes));
#endif
}

// x - 0 is x for every x, also for -0 (0 + x is not), so the compiler leaves only the broadcast.
template <class V>
KVR_INLINE V splat(float x) {
  return x - V{};
}

KVR_INLINE vf splat(float x) { return x - vf{}; }
KVR_INLINE vi splat_i(int32_t x) { return vi{} + x; }

// x as it is in fp32: a product that is rounded before a sum takes it, on every CPU.
KVR_INLINE vf unfused(vf x) {
#if defined(__aarch64__)
  asm("" : "+w"(x));
#else
  asm("" : "+x"(x));
#endif
  return x;
}

// Divides as / does, to the bit, in less time where products can be fused with sums: the second correction is of a
// quotient that is off by less than its last bit, which makes it the nearest one (Markstein). Not for divisors so small
// or large that a quotient is no normal number.
class Divisor {
 public:
  explicit KVR_INLINE Divisor(vf by) : by_(by), inverse_(1.0f / by) {}

  KVR_INLINE vf under(vf x) const {
#if defined(__AVX512F__) || defined(__FMA__)
    const vf near = corrected(x * inverse_, x);
    return corrected(near, x);
#else
    return x / by_;
#endif
  }

 private:
#if defined(__AVX512F__)
  KVR_INLINE vf corrected(vf quotient, vf x) const {
    const __m512 rest = _mm512_fnmadd_ps((__m512)quotient, (__m512)by_, (__m512)x);
    return (vf)_mm512_fmadd_ps(rest, (__m512)inverse_, (__m512)quotient);
  }
#elif defined(__FMA__)
  KVR_INLINE vf corrected(vf quotient, vf x) const {
    const __m256 rest = _mm256_fnmadd_ps((__m256)quotient, (__m256)by_, (__m256)x);
    return (vf)_mm256_fmadd_ps(rest, (__m256)inverse_, (__m256)quotient);
  }
#endif
  vf by_, inverse_;
};

// 0, 1, ..., kLanes - 1.
KVR_INLINE vi iota() {
  vi v{};
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// Lanes of a where mask (all ones or zero per lane) is set, of b elsewhere.
template <class M, class V>
KVR_INLINE V select(M mask, V a, V b) {
  return mask ? a : b;
}

// a where a is larger, else b; a NaN in b stays, a NaN in a does not.
template <class V>
KVR_INLINE V vmax(V a, V b) {
  return a > b ? a : b;
}

template <class V>
KVR_INLINE V vmin(V a, V b) {
  return a < b ? a : b;
}

#if defined(__SSE2__)
KVR_INLINE Vec<4>::F vmax(Vec<4>::F a, Vec<4>::F b) { return (Vec<4>::F)_mm_max_ps((__m128)a, (__m128)b); }
KVR_INLINE Vec<4>::F vmin(Vec<4>::F a, Vec<4>::F b) { return (Vec<4>::F)_mm_min_ps((__m128)a, (__m128)b); }
#endif
#if defined(__AVX2__)
KVR_INLINE Vec<8>::F vmax(Vec<8>::F a, Vec<8>::F b) { return (Vec<8>::F)_mm256_max_ps((__m256)a, (__m256)b); }
KVR_INLINE Vec<8>::F vmin(Vec<8>::F a, Vec<8>::F b) { return (Vec<8>::F)_mm256_min_ps((__m256)a, (__m256)b); }
#endif
#if defined(__AVX512F__)
KVR_INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
KVR_INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#endif

template <class V>
KVR_INLINE auto low_half(V v) {
  using H = typename Vec<sizeof(V) / 8>::F;
  H h;
  __builtin_memcpy(&h, &v, sizeof(H));
  return h;
}

template <class V>
KVR_INLINE auto high_half(V v) {
  using H = typename Vec<sizeof(V) / 8>::F;
  H h;
  __builtin_memcpy(&h, reinterpret_cast<const char*>(&v) + sizeof(H), sizeof(H));
  return h;
}

#if defined(__AVX512DQ__)
KVR_INLINE Vec<8>::F low_half(vf v) { return (Vec<8>::F)_mm512_castps512_ps256((__m512)v); }
KVR_INLINE Vec<8>::F high_half(vf v) { return (Vec<8>::F)_mm512_extractf32x8_ps((__m512)v, 1); }
#endif

KVR_INLINE float hsum(Vec<4>::F v) {
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1);
  return v[0] + v[1];
}

KVR_INLINE float hmax(Vec<4>::F v) {
  v = vmax(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
  return vmax(v, __builtin_shufflevector(v, v, 1, 0, 3, 2))[0];
}

// Sum and maximum over the lanes.
template <class V>
KVR_INLINE float hsum(V v) {
  return hsum(low_half(v) + high_half(v));
}

template <class V>
KVR_INLINE float hmax(V v) {
  return hmax(vmax(low_half(v), high_half(v)));
}

// bf16: a 32-bit word holds two values, element 0 in its low half.
template <class U>
KVR_INLINE auto even(U words) {
  return (typename Vec<sizeof(U) / 4>::F)(words << 16);
}

template <class U>
KVR_INLINE auto odd(U words) {
  return (typename Vec<sizeof(U) / 4>::F)(words & 0xffff0000u);
}

// fp32 -> bf16 bits in the high half of each lane, low half zero: round to nearest even, NaN stays NaN.
template <class F>
KVR_INLINE auto round_bf16(F x) {
  using U = typename Vec<sizeof(F) / 4>::U;
  const U bits = (U)x;
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return (U)select(x == x, (F)rounded, (F)((bits | 0x400000u) & 0xffff0000u));
}

// Two fp32 vectors -> words of bf16 pairs: `first` in the low halves.
template <class F>
KVR_INLINE auto pack_pairs(F first, F second) {
  return (round_bf16(first) >> 16) | round_bf16(second);
}

KVR_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if (x != x) return (uint16_t)((bits >> 16) | 0x40u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

KVR_INLINE float load_bits(uint32_t bits) { return load<float>(&bits); }

KVR_INLINE float from_bf16(uint16_t x) { return load_bits((uint32_t)x << 16); }

// 2^x, relative error below 3e-7 for x in [-126.5, 127]; exactly 0 below (so also for -inf); NaN stays.
template <class V>
KVR_INLINE V exp2v(V x) {
  using U = typename Vec<sizeof(V) / 4>::U;
  const V magic = splat<V>(12582912.0f);  // 1.5 * 2^23: its low mantissa bits take the integer part
  x = vmax(splat<V>(-127.0f), x);
  const V shifted = x + magic;
  const V f = x - (shifted - magic);
  V p = splat<V>(0.001326472614891827f);  // least relative error of degree 5 on [-1/2, 1/2], p(0) = 1
  p = p * f + splat<V>(0.009671512991189957f);
  p = p * f + splat<V>(0.05550733581185341f);
  p = p * f + splat<V>(0.24022242426872253f);
  p = p * f + splat<V>(0.6931470036506653f);
  p = p * f + splat<V>(1.0f);
  return p * (V)(((U)shifted + 127u) << 23);
}

constexpr float kLog2e = 1.44269504088896340736f;

// e^x with exp2v's range and error (plus |x| * 6e-8 from the change of base).
template <class V>
KVR_INLINE V expv(V x) {
  return exp2v(x * kLog2e);
}

// tanh(x), absolute error below 3e-7: 1 - 2 / (e^2x + 1).
template <class V>
KVR_INLINE V tanhv(V x) {
  const V clamped = vmin(splat<V>(15.0f), vmax(splat<V>(-15.0f), x));
  return splat<V>(1.0f) - splat<V>(2.0f) / (expv(clamped + clamped) + splat<V>(1.0f));
}

// ln x, absolute error below 2e-7 + |ln x| 2e-7 for normal x > 0; nothing else is meant.
template <class V>
KVR_INLINE V logv(V x) {
  using U = typename Vec<sizeof(V) / 4>::U;
  using I = typename Vec<sizeof(V) / 4>::I;
  const U moved = (U)x - 0x3f3504f3u;  // the bits of sqrt(1/2), so that the mantissa is in [sqrt(1/2), sqrt(2))
  const V exponent = __builtin_convertvector((I)moved >> 23, V);
  const V f = (V)((moved & 0x7fffffu) + 0x3f3504f3u) - splat<V>(1.0f), square = f * f;
  V p = splat<V>(7.0376836292e-2f);  // Cephes: ln(1 + f) = f - f^2 / 2 + f^3 p(f)
  p = p * f - splat<V>(1.1514610310e-1f);
  p = p * f + splat<V>(1.1676998740e-1f);
  p = p * f - splat<V>(1.2420140846e-1f);
  p = p * f + splat<V>(1.4249322787e-1f);
  p = p * f - splat<V>(1.6668057665e-1f);
  p = p * f + splat<V>(2.0000714765e-1f);
  p = p * f - splat<V>(2.4999993993e-1f);
  p = p * f + splat<V>(3.3333331174e-1f);
  const V low = p * f * square + exponent * -2.12194440e-4f - square * 0.5f;
  return f + low + exponent * 0.693359375f;
}

#if defined(__AVX512BF16__)
// sum + the products of each lane's two bf16, rounded to nearest; numbers smaller than normal ones count as 0. In
// assembly, since GCC copies the accumulator of the intrinsic before each use.
KVR_INLINE __m512 pairs(__m512 sum, __m512bh a, __m512bh b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
#endif

KVR_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// Into the second cache: a core waits for more lines there than in its first one (Zen 4: 1.6 x the bandwidth).
KVR_INLINE void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace kvreclaim::KVR_NS
