// The rotation of int4 and turboquant4: y = H (signs x), H an orthonormal Hadamard matrix of every block of dims as long as
// the largest power of two that divides their number, which is 8 or more. H is its own inverse.
// Oracle: ops/formats/hadamard.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "kvreclaim/simd.h"

namespace kvreclaim::KVR_NS {

KVR_INLINE int64_t hadamard_block(int64_t dims) { return dims & -dims; }

// H x in place for one row. Within eight numbers a sum or difference goes to each lane of a pair.
inline void hadamard_row(int64_t dims, float* x) {
  using F = Vec<8>::F;
  const int64_t block = hadamard_block(dims);
  const float factor = 1.0f / std::sqrt((float)block);
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

// unrotate_row for 16 tokens: x[d * stride + token].
inline void unrotate_panel(const float* signs, int64_t dims, float* x, int64_t stride) {
  const int64_t block = hadamard_block(dims);
  const float factor = 1.0f / std::sqrt((float)block);
  for (int v = 0; v < 16; v += kLanes, x += kLanes) {
    for (int64_t half = 1; half < block; half *= 2)
      for (int64_t first = 0; first < dims; first += 2 * half)
        for (int64_t d = first; d < first + half; ++d) {
          const vf a = load<vf>(x + d * stride), b = load<vf>(x + (d + half) * stride);
          store(x + d * stride, a + b);
          store(x + (d + half) * stride, a - b);
        }
    for (int64_t d = 0; d < dims; ++d) store(x + d * stride, load<vf>(x + d * stride) * (factor * signs[d]));
  }
}

}  // namespace kvreclaim::KVR_NS
