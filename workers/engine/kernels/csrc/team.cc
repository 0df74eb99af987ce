// SPDX-License-Identifier: Apache-2.0
#include "team.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace baton {
namespace {

constexpr int kMaxThreads = 512;

// A call is cut into so many runs of items per thread: few enough to cost little, and who comes late finds some left.
constexpr int64_t kRunsPerThread = 16;

// How long a helper looks out for the next call before it sleeps: longer than the pauses within a step, shorter than
// those between steps.
constexpr std::chrono::microseconds kLookOut{100};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// What is left of one thread's part of a call: runs low .. high - 1, with the call's number in front. That keeps a
// thread that has slept through the end of a call from taking anything of the next one.
class alignas(64) Part {
 public:
  void give(uint32_t call, int64_t low, int64_t high) {
    word_.store(pack(call, static_cast<uint64_t>(low), static_cast<uint64_t>(high)), std::memory_order_release);
  }

  // The first run, or the last one; -1: none is left.
  int64_t take(uint32_t call, bool first) {
    uint64_t word = word_.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t low = word >> 16 & 0xffff, high = word & 0xffff;
      if (word >> 32 != call || low >= high) return -1;
      const uint64_t rest = first ? pack(call, low + 1, high) : pack(call, low, high - 1);
      if (word_.compare_exchange_weak(word, rest, std::memory_order_acq_rel, std::memory_order_acquire))
        return static_cast<int64_t>(first ? low : high - 1);
    }
  }

 private:
  static uint64_t pack(uint64_t call, uint64_t low, uint64_t high) { return call << 32 | low << 16 | high; }
  std::atomic<uint64_t> word_{0};
};

struct alignas(64) Helper {
  std::atomic<bool> asleep{false};
  std::mutex mutex;
  std::condition_variable called;
};

class Team {
 public:
  void set_threads(int own, int borrowed, int processors, const Member* members, int count, int self) {
    members_ = members;
    count_ = members != nullptr ? count : 0;
    self_ = self;
    own_ = own;
    processors_ = processors;
    const int helpers = std::min(own + (members != nullptr ? borrowed : 0), kMaxThreads) - 1;
    // They live as long as the process, and so does the team.
    for (int i = started_; i < helpers; ++i) std::thread([this, i] { help(i); }).detach();
    started_ = std::max(started_, helpers);
    helpers_ = helpers;
  }

  int threads_now() const { return 1 + std::min<int>(helpers_, allowed() - 1); }

  void share(int64_t items, Body body, const void* context) {
    const int64_t threads = threads_now();
    if (threads == 1 || items < 2) return body(context, 0, items);
    body_ = body;
    context_ = context;
    items_ = items;
    runs_ = std::min(items, std::min<int64_t>(threads * kRunsPerThread, UINT16_MAX));
    left_.store(runs_, std::memory_order_relaxed);
    const uint32_t call = call_.load(std::memory_order_relaxed) + 1;
    for (int64_t i = 0; i < threads; ++i) parts_[i].give(call, runs_ * i / threads, runs_ * (i + 1) / threads);
    invited_ = threads;
    call_.store(call);  // in one order with ``asleep``: either the helper sees the call, or it is seen to sleep
    for (int i = 0; i < threads - 1; ++i)
      if (Helper& helper = all_[i]; helper.asleep.load()) {
        const std::lock_guard<std::mutex> lock(helper.mutex);
        helper.called.notify_one();
      }
    work(call, 0);
    for (int spins = 0; left_.load(std::memory_order_acquire) != 0; ++spins)
      if (spins < 4096)
        relax();
      else
        sched_yield();  // a helper's core is being used by others
  }

 private:
  // Threads that may compute now: the own ones, and this process's part of what is left over.
  int allowed() const {
    const int own = own_;
    int busy = 1, left = processors_ - own;
    const Member* members = members_;  // once: set_threads may take it away while a helper looks
    const int count = members != nullptr ? count_.load() : 0;
    for (int i = 0; i < count; ++i)
      if (i != self_ && __atomic_load_n(&members[i].busy, __ATOMIC_RELAXED) != 0) {
        ++busy;
        left -= static_cast<int>(__atomic_load_n(&members[i].threads, __ATOMIC_RELAXED));
      }
    return own + std::max(0, left) / busy;
  }

  // Whether helper ``index`` may compute now.
  bool is_free(int index) const { return index + 1 < own_ || (index < helpers_ && index + 1 < allowed()); }

  void help(int index) {
    for (uint32_t seen = 0;;) {
      seen = next_call(index, seen);
      work(seen, index + 1);
    }
  }

  uint32_t next_call(int index, uint32_t seen) {
    const auto until = std::chrono::steady_clock::now() + kLookOut;
    do {
      for (int spins = 0; spins < 32; ++spins) {
        const uint32_t call = call_.load(std::memory_order_acquire);
        if (call != seen) return call;
        relax();
      }
    } while (is_free(index) && std::chrono::steady_clock::now() < until);
    Helper& helper = all_[index];
    std::unique_lock<std::mutex> lock(helper.mutex);
    helper.asleep.store(true);
    uint32_t call;
    while ((call = call_.load()) == seen) helper.called.wait(lock);
    helper.asleep.store(false);
    return call;
  }

  // Runs of the own part, then of the others' from their ends. ``own`` 0: the caller, who may always compute.
  void work(uint32_t call, int own) {
    const int parts = static_cast<int>(invited_);
    for (int i = 0; i < parts; ++i) {
      Part& part = parts_[(own + i) % parts];
      for (;;) {
        if (own != 0 && !is_free(own - 1)) return;
        const int64_t run = part.take(call, i == 0);
        if (run < 0) break;
        // The call cannot end before this run has: what was written for it is still there.
        body_(context_, items_ * run / runs_, items_ * (run + 1) / runs_);
        left_.fetch_sub(1, std::memory_order_release);
      }
    }
  }

  // Set between calls.
  std::atomic<const Member*> members_{nullptr};
  std::atomic<int> own_{1}, processors_{1}, count_{0}, self_{0}, helpers_{0};
  int started_ = 0;
  std::vector<Helper> all_{kMaxThreads};
  std::vector<Part> parts_{kMaxThreads};

  // Of the call that runs.
  Body body_ = nullptr;
  const void* context_ = nullptr;
  int64_t items_ = 0, runs_ = 0;
  std::atomic<int64_t> invited_{1};
  alignas(64) std::atomic<uint32_t> call_{0};
  alignas(64) std::atomic<int64_t> left_{0};
};

Team& team() {
  static Team* const one = new Team;
  return *one;
}

}  // namespace

int threads_now() { return team().threads_now(); }

void share(int64_t items, Body body, const void* context) { team().share(items, body, context); }

void set_threads(int own, int borrowed, int processors, const Member* members, int count, int self) {
  team().set_threads(own, borrowed, processors, members, count, self);
}

}  // namespace baton
