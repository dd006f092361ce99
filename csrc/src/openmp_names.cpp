// Stands for libgomp.so.1 where a module is linked without one; never shipped, never run.
#include "kvreclaim/openmp.h"

#define KVR_SEEN __attribute__((visibility("default")))
KVR_SEEN int omp_get_thread_num() { return 0; }
KVR_SEEN int omp_get_max_threads() { return 1; }
KVR_SEEN void omp_set_num_threads(int) {}
KVR_SEEN void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) {}
