// Loops: every item exactly once, whoever begins them and wherever.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "harness.h"
#include "kvreclaim/openmp.h"
#include "kvreclaim/pool.h"

namespace kvreclaim::tests {

namespace {

struct Counts {
  std::vector<std::atomic<int>> of_item, on_thread;  // on_thread: working there right now

  std::atomic<int> wrong_threads{0};  // a body does not end the program, which would wait for it
  int pause_us;

  Counts(int64_t items, int pause_us) : of_item(items), on_thread(max_threads()), pause_us(pause_us) {}
};

void count(const void* context, int64_t item) {
  auto& counts = *static_cast<Counts*>(const_cast<void*>(context));
  const int thread = thread_index();
  if (thread < 0 || thread >= (int)counts.on_thread.size() || counts.on_thread[thread]++ != 0) ++counts.wrong_threads;
  if (counts.pause_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(counts.pause_us));
  ++counts.of_item[item];
  if (thread >= 0 && thread < (int)counts.on_thread.size()) --counts.on_thread[thread];
}

void check_loop(int64_t items, int pause_us = 0) {
  Counts counts(items, pause_us);
  run_items(items, count, &counts);
  KVR_CHECK(counts.wrong_threads == 0, "numbers of threads that are others' or too large: %d", counts.wrong_threads.load());
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

KVR_TEST(loops_on_a_team_and_on_the_pool_in_turns) {
  for (int round = 0; round < 200; ++round) {  // helpers of one loop still look for work when the next begins
    lack_cores(round % 2 == 0);
    for (int64_t items : {2, 3, 5}) check_loop(items, 10);
  }
  lack_cores(false);
}

KVR_TEST(pool_after_a_fork) {
  check_loop(20);
  const pid_t child = fork();
  KVR_CHECK(child >= 0, "no fork");
  if (child == 0) {
    KVR_CHECK(lacks_cores(), "OpenMP's team is thought to have come along");
    for (int round = 0; round < 20; ++round) check_loop(20);
    _exit(0);  // what the threads of the parent held has no owner here: no leak to look for
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
