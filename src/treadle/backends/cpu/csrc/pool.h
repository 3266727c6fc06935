// A pool of threads that shares the loops of a step.
//
// All threads of a region run the same code, a sequence of loops. A loop's items are cut into a share for each
// thread; a thread claims items of its own share from first to last, then those left in the others'. A loop is
// finished when all its items are done, whoever did them: a thread that has lost its core delays the others by the
// item it holds and by nothing else, and when it comes back it passes over the loops that were finished meanwhile.
// A thread that has to wait spins for some microseconds and then sleeps, so that it does not take the core from the
// thread that it waits for.
#pragma once
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "simd.h"

namespace treadle {

constexpr std::chrono::microseconds SPIN{30};  // at least the time in which another thread ends an item

// Returns when `done(value)` holds for the value of `word`, which another thread changes and announces by notify_all.
template <class T, class Done>
inline T wait_until(const std::atomic<T>& word, const Done& done) {
  T value = word.load(std::memory_order_acquire);
  if (done(value)) return value;
  const auto end = std::chrono::steady_clock::now() + SPIN;
  do {
    for (int i = 0; i < 16; ++i) {
      relax();
      value = word.load(std::memory_order_acquire);
      if (done(value)) return value;
    }
  } while (std::chrono::steady_clock::now() < end);
  while (!done(value)) {
    word.wait(value, std::memory_order_acquire);
    value = word.load(std::memory_order_acquire);
  }
  return value;
}

// What the threads of a region share. A counter carries the number of the loop that it counts for in its upper half,
// so that a thread that comes late to a loop never claims or counts anything in a later one.
class Region {
 public:
  explicit Region(int threads) : threads_(threads), shares_(new Share[threads]) {}

  int threads() const { return threads_; }

  // Run f(item) for the items of loop `number` that this thread can claim, `grain` at a time, and wait for the rest.
  template <class F>
  void run(uint32_t number, int thread, int count, int shares, int grain, const F& f) {
    int done = 0;
    for (int i = 0; i < shares; ++i) {
      const int share = (thread + i) % shares;
      const int begin = int(int64_t(count) * share / shares), end = int(int64_t(count) * (share + 1) / shares);
      int first;
      while ((first = claim(shares_[share].next, number, end - begin, grain)) >= 0) {
        const int last = std::min(begin + first + grain, end);
        for (int item = begin + first; item < last; ++item) f(item);
        done += last - (begin + first);
      }
    }
    if (done && add(done_, number, done) == count) {
      finished_.store(number, std::memory_order_release);
      finished_.notify_all();
    }
    wait_until(finished_, [&](uint32_t value) { return value >= number; });
  }

 private:
  struct alignas(64) Share {
    std::atomic<uint64_t> next{0};
  };

  // The first of `grain` items of a share of `size`, or -1 if all are claimed.
  static int claim(std::atomic<uint64_t>& next, uint32_t number, int size, int grain) {
    if (size == 0) return -1;
    uint64_t seen = next.load(std::memory_order_relaxed);
    for (;;) {
      const uint32_t loop = uint32_t(seen >> 32);
      const int at = loop == number ? int(uint32_t(seen)) : 0;
      if (loop > number || at >= size) return -1;
      const uint64_t after = uint64_t(number) << 32 | uint32_t(std::min(at + grain, size));
      if (next.compare_exchange_weak(seen, after, std::memory_order_relaxed)) return at;
    }
  }

  static int add(std::atomic<uint64_t>& counter, uint32_t number, int count) {
    uint64_t seen = counter.load(std::memory_order_relaxed), after;
    do {
      after = uint32_t(seen >> 32) == number ? seen + count : uint64_t(number) << 32 | uint32_t(count);
    } while (!counter.compare_exchange_weak(seen, after, std::memory_order_acq_rel));
    return int(uint32_t(after));
  }

  const int threads_;
  std::unique_ptr<Share[]> shares_;
  alignas(64) std::atomic<uint64_t> done_{0};
  alignas(64) std::atomic<uint32_t> finished_{0};
};

// One thread's place in a region.
class Team {
 public:
  // region: null if the thread is alone.
  Team(Region* region, int thread) : region_(region), thread_(thread) {}

  int thread() const { return thread_; }
  int threads() const { return region_ ? region_->threads() : 1; }

  // Run f(item) for each item from 0 to `count`, and return when all are done, by this thread or another. All threads
  // of the region call the same loops in the same order. grain: neighbouring items that are claimed at once.
  template <class F>
  void loop(int count, const F& f, int grain = 1) {
    run(count, threads(), grain, f);
  }

  // The same for items of unlike cost, the most expensive first: whoever is free takes the next one.
  template <class F>
  void queue(int count, const F& f) {
    run(count, 1, 1, f);
  }

 private:
  template <class F>
  void run(int count, int shares, int grain, const F& f) {
    if (count == 0) return;
    if (region_) return region_->run(++number_, thread_, count, shares, grain, f);
    for (int item = 0; item < count; ++item) f(item);
  }

  Region* const region_;
  const int thread_;
  uint32_t number_ = 0;
};

// The threads of the process. They live as long as it does; those that have nothing to do sleep.
class Pool {
 public:
  static Pool& instance() {
    static Pool* const pool = new Pool;  // never destroyed: its threads may outlive static objects
    return *pool;
  }

  // Run body(team) in the calling thread and in up to threads - 1 others. If another thread's region is under way,
  // the caller computes alone: the processors are taken, and the result is the same.
  template <class Body>
  void run(int threads, const Body& body) {
    std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
    if (threads <= 1 || !lock.try_lock()) return body(Team(nullptr, 0));
    start_workers(threads - 1);
    Region region(threads);
    region_ = &region;
    context_ = &body;
    call_ = [](const void* context, Team team) { (*static_cast<const Body*>(context))(team); };
    ++generation_;
    members_.store(uint64_t(generation_) << 32 | OPEN, std::memory_order_release);
    announced_.store(generation_, std::memory_order_release);
    announced_.notify_all();
    body(Team(&region, 0));
    // Whoever has not come yet is not waited for.
    members_.fetch_and(~OPEN, std::memory_order_acq_rel);
    wait_until(members_, [](uint64_t members) { return uint32_t(members) == 0; });
  }

 private:
  static constexpr uint64_t OPEN = uint64_t(1) << 31;

  Pool() = default;

  // Fewer are started if the system refuses; a region needs none of them.
  void start_workers(int count) {
    if (workers_ >= count) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the program
    try {
      for (; workers_ < count; ++workers_) std::thread(&Pool::work, this, workers_ + 1).detach();
    } catch (const std::system_error&) {
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void work(int thread) {
    uint32_t seen = 0;
    for (;;) {
      seen = wait_until(announced_, [&](uint32_t value) { return value != seen; });
      if (!join(seen)) continue;
      if (thread < region_->threads()) call_(context_, Team(region_, thread));
      if (uint32_t(members_.fetch_sub(1, std::memory_order_acq_rel)) == 1) members_.notify_all();
    }
  }

  bool join(uint32_t generation) {
    uint64_t members = members_.load(std::memory_order_acquire);
    while (uint32_t(members >> 32) == generation && members & OPEN)
      if (members_.compare_exchange_weak(members, members + 1, std::memory_order_acq_rel)) return true;
    return false;
  }

  std::mutex mutex_;
  int workers_ = 0;
  uint32_t generation_ = 0;
  Region* region_ = nullptr;
  const void* context_ = nullptr;
  void (*call_)(const void*, Team) = nullptr;
  alignas(64) std::atomic<uint32_t> announced_{0};
  alignas(64) std::atomic<uint64_t> members_{0};  // generation, whether open, how many threads are in the region
};

}  // namespace treadle
