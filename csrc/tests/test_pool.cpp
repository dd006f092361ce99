// Loops: every item exactly once, whoever begins them and wherever.
#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "harness.h"
#include "kvreclaim/pool.h"

namespace kvreclaim::tests {

namespace {

struct Counts {
  std::vector<std::atomic<int>> of_item, on_thread;  // on_thread: working there right now

  explicit Counts(int64_t items) : of_item(items), on_thread(max_threads()) {}
};

void count(const void* context, int64_t item) {
  auto& counts = *static_cast<Counts*>(const_cast<void*>(context));
  const int thread = thread_index();
  KVR_CHECK(thread >= 0 && thread < (int)counts.on_thread.size(), "thread %d", thread);
  KVR_CHECK(counts.on_thread[thread]++ == 0, "two threads have the number %d", thread);
  ++counts.of_item[item];
  --counts.on_thread[thread];
}

void check_loop(int64_t items) {
  Counts counts(items);
  run_items(items, count, &counts);
  for (int64_t i = 0; i < items; ++i)
    KVR_CHECK(counts.of_item[i] == 1, "item %d of %d: %d times", (int)i, (int)items, counts.of_item[i].load());
}

void check_loops() {
  for (int round = 0; round < 300; ++round)
    for (int64_t items : {0, 1, 2, 3, 7, 200}) check_loop(items);
}

struct WithoutCores {
  WithoutCores() { lack_cores(true); }
  ~WithoutCores() { lack_cores(false); }
};

}  // namespace

#ifndef __SANITIZE_THREAD__  // which follows neither OpenMP's threads nor a child that makes its own
KVR_TEST(loops_on_a_team) {
  check_loops();
}

KVR_TEST(pool_after_a_fork) {
  check_loop(20);
  const pid_t child = fork();
  KVR_CHECK(child >= 0, "no fork");
  if (child == 0) {
    KVR_CHECK(lacks_cores(), "OpenMP's team is thought to have come along");
    for (int round = 0; round < 20; ++round) check_loop(20);
    std::exit(0);
  }
  int status = 1;
  KVR_CHECK(waitpid(child, &status, 0) == child && status == 0, "the child ended with %d", status);
  check_loop(20);
}
#endif

KVR_TEST(pool_loops) {
  const WithoutCores here;
  KVR_CHECK(lacks_cores(), "cores are there");
  check_loops();
}

KVR_TEST(pool_number_of_threads_changes) {
  const WithoutCores here;
  for (int threads : {5, 2, 1, 7, 3}) {
    set_max_threads(threads);
    KVR_CHECK(max_threads() == threads, "%d", max_threads());
    for (int round = 0; round < 50; ++round) check_loop(40);
  }
  set_max_threads(0);
  KVR_CHECK(max_threads() == omp_get_max_threads(), "%d", max_threads());
}

KVR_TEST(pool_loops_inside_loops) {
  const WithoutCores here;
  std::vector<std::atomic<int>> inner(30);
  const auto body = [](const void* context, int64_t) {
    run_items(30, [](const void* all, int64_t i) {
      ++(*static_cast<std::vector<std::atomic<int>>*>(const_cast<void*>(all)))[i];
    }, context);
  };
  for (int round = 0; round < 20; ++round) run_items(10, body, &inner);
  for (const auto& each : inner) KVR_CHECK(each == 200, "%d times", each.load());
}

KVR_TEST(pool_several_callers) {
  const WithoutCores here;
  std::vector<std::thread> callers;
  const int threads = max_threads();
  for (int i = 0; i < 3; ++i)
    callers.emplace_back([threads] {
      set_max_threads(threads);
      for (int round = 0; round < 300; ++round) check_loop(20);
    });
  for (auto& caller : callers) caller.join();
}

}  // namespace kvreclaim::tests
