// What is used of OpenMP, called by the names of libgomp, whose team of threads torch has, too. Without pragmas, because
// clang turns those into calls of another runtime, which would be a second team beside torch's.
#pragma once

extern "C" {
int omp_get_thread_num(void);
int omp_get_max_threads(void);
void omp_set_num_threads(int threads);
void GOMP_parallel(void (*body)(void*), void* context, unsigned threads, unsigned flags);
}

namespace kvreclaim {

// body() on each of so many threads; returns when all are through.
template <class Body>
void on_team(int threads, Body& body) {
  GOMP_parallel([](void* own) { (*static_cast<Body*>(own))(); }, &body, (unsigned)threads, 0);
}

}  // namespace kvreclaim
