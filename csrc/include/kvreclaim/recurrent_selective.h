// Mamba-1's selective scan: each channel has a state and decays of its own. Channels lie side by side in vectors, so that
// neither decays nor sums cross lanes; tokens that decode and prompts take the same loop.
#pragma once

#include "kvreclaim/recurrent_scan.h"

namespace kvreclaim::KVR_NS::recurrent_detail {

constexpr int64_t kScanChannels = 64;  // of a work item

// ln(1 + e^x); what 1 + e^x rounds off is added behind the logarithm.
KVR_INLINE vf softplusv(vf x) {
  const vf one = splat(1.0f), e = expv(vmin(x, splat(20.0f))), sum = e + one;
  const vf found = logv(sum) + (e - (sum - one)) / sum;
  return x > splat(20.0f) ? x : found;
}

// The first `here` numbers, then zeros.
template <Type T>
KVR_INLINE vf lanes(const char* p, int64_t here) {
  float x[kLanes] = {};
  if (here == kLanes)
    for (int64_t j = 0; j < kLanes; ++j) x[j] = at<T>(p, j);
  else
    for (int64_t j = 0; j < here; ++j) x[j] = at<T>(p, j);
  return load<vf>(x);
}

// x [size] -> y, normed and rounded as a module does that; without a weight as it is.
template <Type T>
inline void norm_or_copy(const char* x, const char* weight, float* y, int64_t size, float eps) {
  for (int64_t n = 0; n < size; ++n) y[n] = at<T>(x, n);
  if (weight == nullptr) return;
  const float factor = 1.0f / std::sqrt(dot(y, y, size) / (float)size + eps);
  for (int64_t n = 0; n < size; ++n) y[n] = rounded<T>(at<T>(weight, n) * rounded<T>(y[n] * factor));
}

// Channels [first, first + here) of one sequence. bc [T, 2 * size].
template <Type T>
inline void selective_lanes(const SelectiveScanArgs& a, int64_t sequence, int64_t first, int64_t here, const float* bc) {
  const StepRows& s = a.step;
  const int64_t size = size_of(T), slot_size = a.channels * a.size, start = s.starts[sequence];
  float *state = thread_scratch(2 * a.size * kLanes), *decay = state + a.size * kLanes;
  std::fill_n(state, 2 * a.size * kLanes, 0.0f);
  for (int64_t n = 0; n < a.size; ++n) std::copy_n(a.a + n * a.channels + first, here, decay + n * kLanes);
  if (s.read[sequence] >= 0)
    transpose(a.states + s.read[sequence] * slot_size + first * a.size, a.size, state, kLanes, here, a.size);
  const vf d = lanes<Type::kF32>(reinterpret_cast<const char*>(a.d + first), here);
  for (int64_t t = start; t < s.starts[sequence + 1]; ++t) {
    const vf x = lanes<T>(s.rows + (t * s.stride + first) * size, here);
    const vf dt = norm_detail::rounded<T>(softplusv(lanes<T>(a.dt + (t * a.dt_stride + first) * size, here)));
    const vf added = dt * x;
    const float *b = bc + 2 * t * a.size, *c = b + a.size;
    vf sum{};
    for (int64_t n = 0; n < a.size; ++n) {
      const vf next = load<vf>(state + n * kLanes) * exp2v(dt * load<vf>(decay + n * kLanes)) + added * splat(b[n]);
      store(state + n * kLanes, next);
      sum += next * splat(c[n]);
    }
    const vf gate = norm_detail::rounded<T>(silu(lanes<T>(a.z + (t * a.z_stride + first) * size, here)));
    const vf y = (norm_detail::rounded<T>(sum) + x * d) * gate;
    char* out = s.out + (t * a.channels + first) * size;
    for (int64_t j = 0; j < here; ++j) put<T>(out, j, y[j]);
    if (const int64_t slot = s.write[t]; slot >= 0)
      transpose(state, kLanes, a.states + slot * slot_size + first * a.size, a.size, a.size, here);
  }
}

template <Type T>
inline void selective_typed(const SelectiveScanArgs& a) {
  const StepRows& s = a.step;
  float* bc = call_scratch(2 * s.tokens * a.size);
  parallel_for((s.tokens + kShare - 1) / kShare, [&](int64_t item) {
    for (int64_t t = item * kShare; t < std::min(s.tokens, (item + 1) * kShare); ++t) {
      const char* row = a.bc + t * a.bc_stride * size_of(T);
      float* own = bc + 2 * t * a.size;
      norm_or_copy<T>(row, a.b_norm, own, a.size, a.eps);
      norm_or_copy<T>(row + a.size * size_of(T), a.c_norm, own + a.size, a.size, a.eps);
    }
  });
  const int64_t blocks = (a.channels + kScanChannels - 1) / kScanChannels;
  parallel_for(s.count * blocks, [&](int64_t item) {
    const int64_t first = item % blocks * kScanChannels, end = std::min(a.channels, first + kScanChannels);
    for (int64_t at = first; at < end; at += kLanes)
      selective_lanes<T>(a, item / blocks, at, std::min<int64_t>(kLanes, end - at), bc);
  });
}

}  // namespace kvreclaim::KVR_NS::recurrent_detail
