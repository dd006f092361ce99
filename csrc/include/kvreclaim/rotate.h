// The rotation of int4 and turboquant4: y = H (signs x), H an orthonormal Hadamard matrix of every block of dims as long as
// the largest power of two that divides their number, which is 8 or more. H is its own inverse.
// Oracle: ops/formats/hadamard.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "kvreclaim/simd.h"

namespace kvreclaim::KVR_NS {

KVR_INLINE int64_t hadamard_block(int64_t dims) { return dims & -dims; }
KVR_INLINE float hadamard_factor(int64_t dims) { return 1.0f / std::sqrt((float)hadamard_block(dims)); }

// H x in place for one row. Within eight numbers a sum or difference goes to each lane of a pair.
inline void hadamard_row(int64_t dims, float* x) {
  using F = Vec<8>::F;
  const int64_t block = hadamard_block(dims);
  const float factor = hadamard_factor(dims);
  for (int64_t d = 0; d < dims; d += 8) {
    F y = load<F>(x + d);
    y = __builtin_shufflevector(y, y, 1, 0, 3, 2, 5, 4, 7, 6) + y * F{1, -1, 1, -1, 1, -1, 1, -1};
    y = __builtin_shufflevector(y, y, 2, 3, 0, 1, 6, 7, 4, 5) + y * F{1, 1, -1, -1, 1, 1, -1, -1};
    y = __builtin_shufflevector(y, y, 4, 5, 6, 7, 0, 1, 2, 3) + y * F{1, 1, 1, 1, -1, -1, -1, -1};
    store(x + d, y);
  }
  for (int64_t half = 8; half < block; half *= 2)
    for (int64_t first = 0; first < dims; first += 2 * half)
      for (int64_t d = first; d < first + half; d += 8) {
        const F a = load<F>(x + d), b = load<F>(x + d + half);
        store(x + d, a + b);
        store(x + d + half, a - b);
      }
  for (int64_t d = 0; d < dims; ++d) x[d] *= factor;
}

inline void rotate_row(const float* signs, int64_t dims, float* x) {
  for (int64_t d = 0; d < dims; ++d) x[d] *= signs[d];
  hadamard_row(dims, x);
}

inline void unrotate_row(const float* signs, int64_t dims, float* x) {
  hadamard_row(dims, x);
  for (int64_t d = 0; d < dims; ++d) x[d] *= signs[d];
}

// All sums and differences of R numbers that lie `step` floats apart, for a vector of tokens.
template <int R>
KVR_INLINE void butterflies(float* x, int64_t step) {
  vf y[R];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) y[i] = load<vf>(x + i * step);
#pragma GCC unroll 3
  for (int half = 1; half < R; half *= 2)
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i)
      if (!(i & half)) {
        const vf a = y[i], b = y[i + half];
        y[i] = a + b, y[i + half] = a - b;
      }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) store(x + i * step, y[i]);
}

template <int R>
inline void butterfly_pass(int64_t dims, int64_t half, float* x, int64_t stride) {
  for (int64_t first = 0; first < dims; first += R * half)
    for (int64_t d = first; d < first + half; ++d) butterflies<R>(x + d * stride, half * stride);
}

// Unscaled H x in place for a vector of tokens: x[d * stride + token].
inline void hadamard_panel(int64_t dims, float* x, int64_t stride) {
  const int64_t block = hadamard_block(dims);
  int64_t half = 1;
  for (; 8 * half <= block; half *= 8) butterfly_pass<8>(dims, half, x, stride);
  if (4 * half == block) butterfly_pass<4>(dims, half, x, stride);
  if (2 * half == block) butterfly_pass<2>(dims, half, x, stride);
}

// unrotate_row for 16 tokens: x[d * stride + token].
inline void unrotate_panel(const float* signs, int64_t dims, float* x, int64_t stride) {
  const float factor = hadamard_factor(dims);
  for (int v = 0; v < 16; v += kLanes, x += kLanes) {
    hadamard_panel(dims, x, stride);
    for (int64_t d = 0; d < dims; ++d) store(x + d * stride, load<vf>(x + d * stride) * (factor * signs[d]));
  }
}

}  // namespace kvreclaim::KVR_NS
