// Loops over independent work items on OpenMP, whose pool torch shares (same libgomp): the number of
// threads is torch's.
#pragma once

#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kvreclaim/simd.h"

namespace kvreclaim::KVR_NS {

KVR_INLINE int max_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

KVR_INLINE int thread_index() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// body(item) for each item of [0, items), handed out one by one in ascending order; thread_index() is
// valid inside. The body must not throw.
template <class Body>
inline void parallel_for(int64_t items, const Body& body) {
#ifdef _OPENMP
  if (items > 1 && omp_get_max_threads() > 1) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < items; ++i) body(i);
    return;
  }
#endif
  for (int64_t i = 0; i < items; ++i) body(i);
}

}  // namespace kvreclaim::KVR_NS
