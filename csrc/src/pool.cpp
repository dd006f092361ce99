// One pool for the process, compiled once. Threads are made when a loop first wants them.
#include "kvreclaim/pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "kvreclaim/openmp.h"

namespace kvreclaim {

namespace {

using Clock = std::chrono::steady_clock;

// A thread without work looks for some for so long before it sleeps.
constexpr std::chrono::microseconds kSpin{50};

thread_local int own_index = 0;
thread_local int given_threads = 0;  // 0: as many as OpenMP's loops have

inline void relax() {
#ifdef KVR_X86
  __builtin_ia32_pause();
#endif
}

// Looks again and again for a short while; whether ready() has come true.
template <class Ready>
bool spin(const Ready& ready) {
  constexpr int kLooks = 16;  // between two looks at the clock
  const Clock::time_point end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < kLooks; ++i, relax())
      if (ready()) return true;
  } while (Clock::now() < end);
  return false;
}

// What one thread waits at. Whoever makes ready() true rings afterwards; all that is shared is sequentially
// consistent, so either the ringer sees the sleeper or the sleeper sees what it waits for.
class Bell {
 public:
  template <class Ready>
  void await(const Ready& ready) {
    while (!spin(ready)) sleep(ready);
  }

  void ring() {
    if (!asleep_) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      asleep_ = false;  // the next ringer need not ring for who is about to wake
    }
    rung_.notify_one();
  }

 private:
  template <class Ready>
  void sleep(const Ready& ready) {
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_ = true;
    if (!ready()) rung_.wait(lock);
    asleep_ = false;
  }

  std::mutex mutex_;
  std::condition_variable rung_;
  std::atomic<bool> asleep_{false};
};

// Who shares a loop: OpenMP's threads, whose end it waits for, or helpers, who may still look for work when the next
// loop begins and must not take the team's, whose caller would not know.
enum class Whose : uint64_t { kHelpers, kTeam };

// Whose the loop is, how many threads it has, and how many of its items are not begun. In one number, so that a
// thread that takes an item knows it to be of a loop that stays until the item is done, and reads the rest afterwards.
struct Open {
  static constexpr int kWhoseShift = 63, kThreadsShift = 48;
  static constexpr int64_t kMostThreads = (1 << (kWhoseShift - kThreadsShift)) - 1;
  uint64_t word;

  static uint64_t of(Whose whose, int threads, int64_t items) {
    return (uint64_t)whose << kWhoseShift | (uint64_t)threads << kThreadsShift | (uint64_t)items;
  }
  int64_t left() const { return (int64_t)(word & ((1ull << kThreadsShift) - 1)); }
  bool is_for(Whose whose, int index) const {
    const int threads = (int)(word >> kThreadsShift & kMostThreads);
    return left() > 0 && (Whose)(word >> kWhoseShift) == whose && index < threads;
  }
};

// Whether each thread of a team has a core. Found out by what waiting for them costs: after a loop that waited too
// long none is waited for during a pause, which doubles while the next try fares no better.
class Cores {
 public:
  bool are_there(Clock::time_point now) const { return now >= again_.load(); }

  // A loop took from `begun` to `ended`, of which its caller waited `idle` for the others. An uneven last item may
  // cost half of a loop, a core that another process has at least a slice of the scheduler's.
  void note(Clock::time_point begun, Clock::time_point ended, Clock::duration idle) {
    if (idle > kSlice + (ended - begun) / 2) lack(ended);
  }

  void lack(Clock::time_point now) {
    pause_ = now - again_.load() < pause_ ? std::min(2 * pause_, kLongest) : kShortest;
    again_ = now + pause_;
  }

  void lack_for_good(bool lacking) { again_ = lacking ? Clock::time_point::max() : Clock::time_point{}; }

 private:
  static constexpr Clock::duration kSlice = std::chrono::milliseconds(1);
  static constexpr Clock::duration kShortest = std::chrono::milliseconds(20), kLongest = std::chrono::seconds(1);
  Clock::duration pause_ = kShortest;
  std::atomic<Clock::time_point> again_{Clock::time_point{}};  // anybody may ask
};

class Pool {
 public:
  explicit Pool(Pool* parent) : parent_(parent) {
    cores_.lack_for_good(parent != nullptr);  // OpenMP's team does not survive a fork either
  }

  // False, and nothing done, while another loop is under way.
  bool run(int threads, int64_t items, ItemBody body, const void* context) {
    if (busy_.exchange(true)) return false;
    body_ = body, context_ = context, items_ = items;
    unfinished_ = items;
    const Clock::time_point begun = Clock::now();
    if (cores_.are_there(begun))
      run_team(threads, begun);
    else
      run_helpers(threads);
    busy_ = false;
    return true;
  }

  bool lacks_cores() const { return !cores_.are_there(Clock::now()); }

  void lack_cores(bool lacking) {
    while (busy_.exchange(true)) sched_yield();
    cores_.lack_for_good(lacking || parent_ != nullptr);
    busy_ = false;
  }

  // For good: later loops find the pool busy.
  void stop() {
    while (busy_.exchange(true)) sched_yield();
    stopped_ = true;
    for (const auto& helper : helpers_) helper->bell.ring();
    for (const auto& helper : helpers_) pthread_join(helper->thread, nullptr);
    helpers_.clear();
  }

 private:
  struct Helper {
    Pool* pool;
    int index;
    pthread_t thread;
    Bell bell;

    Helper(Pool* pool, int index) : pool(pool), index(index) {}
  };

  // On OpenMP's threads, whom torch's loops use, too: they need not be woken then, and take no core from each other.
  void run_team(int threads, Clock::time_point begun) {
    Clock::time_point first, last;
    open_ = Open::of(Whose::kTeam, threads, items_);
    auto body = [&] {
      const int index = omp_get_thread_num();
      if (index == 0) first = Clock::now();
      work(Whose::kTeam, index);
      if (index == 0) last = Clock::now();
    };
    on_team(threads, body);
    const Clock::time_point ended = Clock::now();
    cores_.note(begun, ended, first - begun + (ended - last));
  }

  void run_helpers(int threads) {
    grow((size_t)threads - 1);
    open_ = Open::of(Whose::kHelpers, threads, items_);
    const size_t helpers = std::min(helpers_.size(), (size_t)threads - 1);
    for (size_t i = 0; i < helpers; ++i) helpers_[i]->bell.ring();
    work(Whose::kHelpers, 0);
    finished_.await([this] { return unfinished_ == 0; });
  }

  // Fewer where the system gives no more threads.
  void grow(size_t count) {
    while (helpers_.size() < count) {
      auto helper = std::make_unique<Helper>(this, (int)helpers_.size() + 1);
      if (!begin(*helper)) return;
      helpers_.push_back(std::move(helper));
    }
  }

  // Signals are for the threads of the program.
  static bool begin(Helper& helper) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const auto main = [](void* self) -> void* {
      static_cast<Helper*>(self)->pool->help(*static_cast<Helper*>(self));
      return nullptr;
    };
    const bool begun = pthread_create(&helper.thread, nullptr, main, &helper) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return begun;
  }

  void help(Helper& own) {
    for (;;) {
      own.bell.await([&] { return stopped_ || Open{open_}.is_for(Whose::kHelpers, own.index); });
      if (stopped_) return;
      work(Whose::kHelpers, own.index);
    }
  }

  void work(Whose whose, int index) {
    own_index = index;
    int64_t done = 0;
    for (Open open{open_}; open.is_for(whose, index);) {
      if (!open_.compare_exchange_weak(open.word, open.word - 1)) continue;
      body_(context_, items_ - open.left());
      ++done;
      open.word = open_;
    }
    if (done > 0 && unfinished_.fetch_sub(done) == done) finished_.ring();
  }

  alignas(64) std::atomic<uint64_t> open_{0};
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) ItemBody body_ = nullptr;  // this and the next two: of the loop that is open
  const void* context_ = nullptr;
  int64_t items_ = 0;
  std::atomic<bool> stopped_{false};
  Bell finished_;
  alignas(64) std::atomic<bool> busy_{false};
  Cores cores_;  // changed by whose loop it is, as are the helpers
  std::vector<std::unique_ptr<Helper>> helpers_;
  const Pool* parent_;  // before the fork; kept as it was then
};

std::atomic<Pool*> pool{nullptr};

// A forked child has none of the threads, and whatever they were at is as it was: it begins with another pool.
struct Lifetime {
  Lifetime() {
    pool = new Pool(nullptr);
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool(pool); });
  }
  ~Lifetime() { pool.load()->stop(); }
} lifetime;

}  // namespace

int max_threads() { return given_threads > 0 ? given_threads : omp_get_max_threads(); }

void set_max_threads(int threads) { given_threads = threads; }

int thread_index() { return own_index; }

bool lacks_cores() { return pool.load()->lacks_cores(); }

void lack_cores(bool lacking) { pool.load()->lack_cores(lacking); }

void run_items(int64_t items, ItemBody body, const void* context) {
  const int threads = (int)std::min<int64_t>({max_threads(), items, Open::kMostThreads});
  if (threads > 1 && pool.load()->run(threads, items, body, context)) return;
  for (int64_t i = 0; i < items; ++i) body(context, i);
}

}  // namespace kvreclaim
