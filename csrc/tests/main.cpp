// Runs every test on every instruction set of this CPU, on one thread and on three.
#include "harness.h"
#include "kvreclaim/openmp.h"

int main() {
  using kvreclaim::tests::Test;
  int count = 0;
  for (const char* const* isa = kvreclaim::supported_isas(); *isa != nullptr; ++isa) {
    kvreclaim::set_isa(*isa);
    for (int threads : {1, 3}) {
      omp_set_num_threads(threads);
      for (Test* test = Test::first(); test != nullptr; test = test->next, ++count) {
        std::printf("%s, %d threads: %s\n", *isa, threads, test->name);
        std::fflush(stdout);
        test->run();
      }
    }
  }
  std::printf("%d runs passed\n", count);
  return count > 0 ? 0 : 1;
}
