// Loops of kernels over independent work items, on the pool that all instruction sets share.
#pragma once

#include <cstdint>

#include "kvreclaim/pool.h"
#include "kvreclaim/simd.h"

namespace kvreclaim::KVR_NS {

// run_items for a body(item) of any type; one that cannot be shared is called without a detour.
template <class Body>
inline void parallel_for(int64_t items, const Body& body) {
  if (items > 1 && max_threads() > 1) {
    run_items(items, [](const void* context, int64_t item) { (*static_cast<const Body*>(context))(item); }, &body);
    return;
  }
  for (int64_t i = 0; i < items; ++i) body(i);
}

}  // namespace kvreclaim::KVR_NS
