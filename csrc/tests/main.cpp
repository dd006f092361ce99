// Runs every test on every instruction set of this CPU, on one thread and on three. With a number of seconds, as many
// of them as begin within these: for processors that are emulated.
#include <chrono>
#include <cstdlib>

#include "harness.h"
#include "kvreclaim/openmp.h"

int main(int argc, char** argv) {
  using kvreclaim::tests::Test;
  using Clock = std::chrono::steady_clock;
  const double limit = argc > 1 ? std::atof(argv[1]) : 1e9;
  const auto start = Clock::now();
  int count = 0, left = 0;
  for (const char* const* isa = kvreclaim::supported_isas(); *isa != nullptr; ++isa) {
    kvreclaim::set_isa(*isa);
    for (int threads : {1, 3}) {
      omp_set_num_threads(threads);
      for (Test* test = Test::first(); test != nullptr; test = test->next) {
        if (std::chrono::duration<double>(Clock::now() - start).count() > limit) {
          ++left;
          continue;
        }
        ++count;
        std::printf("%s, %d threads: %s\n", *isa, threads, test->name);
        std::fflush(stdout);
        test->run();
      }
    }
  }
  std::printf(left ? "%d runs passed, %d not begun\n" : "%d runs passed\n", count, left);
  return count > 0 ? 0 : 1;
}
