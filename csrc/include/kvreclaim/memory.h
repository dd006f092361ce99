// Scratch memory that grows to the largest need and is kept: one per thread, one per calling thread.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "kvreclaim/simd.h"

namespace kvreclaim::KVR_NS {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // At least `count` floats, 64-byte aligned, uninitialised; valid until the next get.
  float* get(int64_t count) {
    if (count > count_) {
      std::free(data_);
      count_ = (count + 1023) / 1024 * 1024;
      data_ = static_cast<float*>(std::aligned_alloc(64, count_ * sizeof(float)));
      if (data_ == nullptr) std::abort();
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t count_ = 0;
};

// For the body of a parallel loop.
inline float* thread_scratch(int64_t count) {
  static thread_local Scratch scratch;
  return scratch.get(count);
}

// For what all threads of one call share; taken outside the loop.
inline float* call_scratch(int64_t count) {
  static thread_local Scratch scratch;
  return scratch.get(count);
}

}  // namespace kvreclaim::KVR_NS
