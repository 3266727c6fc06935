// Regions of many short loops, from two threads at once; exits with 1 and says why if an item is lost or done twice,
// or a loop begins before the last one has ended.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "pool.h"

using namespace treadle;

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

void regions(unsigned seed) {
  for (int round = 0; round < 300; ++round) {
    seed = seed * 1664525u + 1013904223u;
    const int threads = 1 + int(seed >> 8) % 5, loops = 1 + int(seed >> 12) % 40;
    std::vector<int> counts, grains;
    for (int i = 0; i < loops; ++i) {
      seed = seed * 1664525u + 1013904223u;
      counts.push_back(int(seed >> 16) % 50);
      grains.push_back(1 + int(seed >> 24) % 4);
    }
    // Not atomic: the pool has to order every access.
    std::vector<std::vector<int>> done(loops);
    for (int i = 0; i < loops; ++i) done[i].assign(counts[i], 0);
    Pool::instance().run(threads, [&](Team team) {
      for (int i = 0; i < loops; ++i) {
        const auto item = [&](int at) {
          if (i > 0)
            for (int before : done[i - 1]) check(before == 1, "a loop began before the last one had ended");
          check(++done[i][at] == 1, "an item was done twice");
        };
        if (i % 3)
          team.loop(counts[i], item, grains[i]);
        else
          team.queue(counts[i], item);
      }
    });
    for (const auto& items : done)
      for (int count : items) check(count == 1, "an item was lost");
  }
}

}  // namespace

int main() {
  std::thread other(regions, 1);
  regions(2);
  other.join();
}
