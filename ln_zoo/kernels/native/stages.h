// Steps that threads run together, with a barrier after each stage of a step.

#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <vector>

#include "threads.h"

namespace {

// Scheduler of the stages of all steps, numbered from 1; a stage starts when all shares have
// finished the previous one.
//
// A thread runs its own share, then unstarted shares of others, so that preempted threads do not
// block the rest. While a share is in progress, it spins for about the cost of a sleep, then
// sleeps. Results do not depend on which thread runs a share.
class Relay {
 public:
  explicit Relay(int64_t shares) : shares_(shares), taken_(shares) {}

  // Claim a share; false if another thread has it.
  bool take(int64_t share, int64_t stage) {
    int64_t before = stage - 1;
    return taken_[share].stage.compare_exchange_strong(before, stage);
  }

  // Mark one share of a stage as done.
  void done(int64_t stage) {
    if (done_.fetch_add(1) + 1 < shares_ * stage || sleepers_.load() == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }

  // Wait until all shares of a stage are done.
  void wait(int64_t stage) {
    const auto over = [&] { return done_.load() >= shares_ * stage; };
    for (int64_t spins = 0; spins < SPINS; spins++) {
      if (over()) return;
      pause();
    }
    // Either the thread with the last share sees the sleeper, or this thread sees the stage's end.
    sleepers_.fetch_add(1);
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, over);
    sleepers_.fetch_sub(1);
  }

 private:
  struct alignas(64) Taken {
    std::atomic<int64_t> stage{0};
  };
  const int64_t shares_;
  std::vector<Taken> taken_;
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int64_t> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;

  static constexpr int64_t SPINS = 2000;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
};

// The work for a share at a step.
using Stage = std::function<void(int64_t share, int64_t t)>;

// Run the stages of each step in order, each for all shares. There may be fewer threads than
// shares.
void by_steps(int64_t shares, int64_t steps, bool backwards, const std::vector<Stage>& stages) {
  Relay relay(shares);
  const auto run = [&](int64_t thread) {
    const FlushSubnormals flush;
    int64_t number = 0;
    for (int64_t k = 0; k < steps; k++) {
      const int64_t t = backwards ? steps - 1 - k : k;
      for (const Stage& stage : stages) {
        number++;
        for (int64_t i = 0; i < shares; i++) {
          const int64_t share = (thread + i) % shares;
          if (!relay.take(share, number)) continue;
          stage(share, t);
          relay.done(number);
        }
        relay.wait(number);
      }
    }
  };
#ifdef _OPENMP
  if (threads_for(shares, shares) > 1) {
#pragma omp parallel num_threads(int(shares))
    run(omp_get_thread_num());
    return;
  }
#endif
  run(0);
}

}  // namespace
