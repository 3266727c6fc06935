// Choosing tokens from logits, one row at a time: penalties, filters, the draw, log-probabilities.
//
// Nothing here depends on the batch: a row's sums go over its vocabulary in a fixed order.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "pool.h"

namespace treadle {

extern "C" {

// Rows of logits to draw from; arrays are [rows].
struct Draws {
  const float* logits;   // [.., vocab]
  const int32_t* place;  // [rows], of the row's logits
  const float* temperature;
  const float* top_p;
  const float* min_p;
  const int32_t* top_k;   // 0 for all
  const double* noise;    // in [0, 1)
  const uint8_t* greedy;  // take the most likely token
  int32_t* token_ids;     // out
  int32_t rows, vocab, threads;
};

// Rows whose log-probabilities are reported.
struct Reports {
  const float* logits;       // [.., vocab]
  const int32_t* place;      // [rows], of the row's logits
  const int32_t* token_ids;  // [rows]
  const int32_t* num_top;    // [rows], at most max_top
  float* logprobs;           // out [rows], of the token
  int32_t* ranks;            // out [rows], from 1
  int32_t* top_ids;          // out [rows, max_top], best first
  float* top_logprobs;       // out [rows, max_top]
  int32_t rows, max_top, vocab, threads;
};

// Rows whose logits penalties change; tokens is [.., token_stride] and holds prompts and outputs.
struct Penalties {
  float* logits;         // [.., vocab], changed
  const int32_t* place;  // [rows], of the row's logits
  const int32_t* token_rows;
  const int32_t* tokens;
  const int32_t* num_tokens;
  const int32_t* num_prompt_tokens;
  const float* repetition;
  const float* presence;
  const float* frequency;
  int64_t token_stride;
  int32_t rows, vocab, threads;
};

}  // extern "C"

constexpr int BLOCK = 256;  // weights that are summed in float before the sum is added to a double

template <class F>
inline void for_vectors(int n, const F& f) {
  for (int i = 0; i < n; i += W) f(i, std::min(W, n - i));
}

inline float highest_of(const float* x, int n) {
  constexpr float never = -std::numeric_limits<float>::infinity();
  vf top = set1(never);
  for_vectors(n, [&](int i, int count) { top = max(load_first(x + i, count, never), top); });
  return reduce_max(top);
}

inline int argmax(const float* x, int n) {
  const float highest = highest_of(x, n);
  for (int i = 0; i < n; ++i)
    if (x[i] == highest) return i;
  return 0;
}

class RowSampler {
 public:
  explicit RowSampler(int vocab) : vocab_(vocab), p_(vocab), blocks_((vocab + BLOCK - 1) / BLOCK) {}

  int draw(const float* logits, float temperature, int top_k, float top_p, float min_p, double noise) {
    weights_of(logits, temperature);
    float least = min_p;
    if (top_k > 0 && top_k < vocab_) {
      collect_count(top_k);
      std::nth_element(few_.begin(), few_.begin() + (top_k - 1), few_.end(), std::greater<float>());
      few_.resize(top_k);
      least = std::max(least, *std::min_element(few_.begin(), few_.end()));
      if (top_p < 1.0f) {
        double total = 0.0;
        for (float p : few_) total += p;
        least = std::max(least, nucleus(top_p * total));
      }
    } else if (top_p < 1.0f) {
      const double target = double(top_p) * mass(0.0f);
      collect_mass(target);
      least = std::max(least, nucleus(target));
    }
    return pick(least, noise);
  }

 private:
  // p[i] = exp((logit - highest) / temperature): 1 for the most likely token.
  void weights_of(const float* logits, float temperature) {
    const vf highest = set1(highest_of(logits, vocab_)), scale = set1(LOG2_E / temperature);
    const vf never = set1(-126.0f);
    for_vectors(vocab_, [&](int i, int n) {
      const vf x = mul(sub(load_first(logits + i, n, -std::numeric_limits<float>::infinity()), highest), scale);
      vf p = exp2(x);
      // What exp2 clamps (above all the -inf of forbidden tokens) must have a weight of exactly 0.
      const uint32_t alive = mask_gt(x, never);
      alignas(64) float values[W];
      store(values, p);
      if (alive != (uint32_t(1) << W) - 1)
        for (int j = 0; j < W; ++j)
          if (!(alive >> j & 1)) values[j] = 0.0f;
      std::memcpy(p_.data() + i, values, n * sizeof(float));
    });
  }

  // Sum of the weights that are at least `least`, by blocks.
  double mass(float least) {
    double total = 0.0;
    for (int b = 0; b * BLOCK < vocab_; ++b) {
      const int n = std::min(BLOCK, vocab_ - b * BLOCK);
      vf sum = zero();
      for_vectors(n, [&](int i, int count) {
        const vf p = load_first(p_.data() + b * BLOCK + i, count, 0.0f);
        sum = add(sum, zero_below(p, least));
      });
      blocks_[b] = reduce_add(sum);
      total += blocks_[b];
    }
    return total;
  }

  int count(float least) const {
    int total = 0;
    for_vectors(vocab_, [&](int i, int n) {
      total += __builtin_popcount(mask_ge(load_first(p_.data() + i, n, -1.0f), set1(least)));
    });
    return total;
  }

  // Weights that are at least `least`: few compared with the vocabulary, so that sorting them is cheap.
  void collect(float least) {
    few_.clear();
    for_vectors(vocab_, [&](int i, int n) {
      uint32_t mask = mask_ge(load_first(p_.data() + i, n, -1.0f), set1(least));
      for (; mask; mask &= mask - 1) few_.push_back(p_[i + __builtin_ctz(mask)]);
    });
  }

  static constexpr float STEPS[] = {0x1p-5f, 0x1p-8f, 0x1p-11f, 0x1p-15f, 0x1p-20f, 0.0f};

  void collect_count(int least_count) {
    for (float least : STEPS)
      if (least == 0.0f || count(least) >= least_count) return collect(least);
  }

  void collect_mass(double target) {
    for (float least : STEPS)
      if (least == 0.0f || mass(least) >= target) return collect(least);
  }

  // The lowest weight in the smallest set of highest weights among `few_` whose sum reaches `target`.
  float nucleus(double target) {
    size_t low = 0, high = few_.size();
    while (high - low > 32) {
      const float a = few_[low], b = few_[(low + high) / 2], c = few_[high - 1];
      const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
      double above = 0.0, equal = 0.0;
      const auto first = few_.begin();
      const auto not_above = std::partition(first + low, first + high, [&](float p) {
        if (p > pivot) above += p;
        return p > pivot;
      });
      if (above >= target) {
        high = not_above - first;
        continue;
      }
      const auto below = std::partition(not_above, first + high, [&](float p) {
        if (p == pivot) equal += p;
        return p == pivot;
      });
      if (above + equal >= target) return pivot;
      target -= above + equal;
      low = below - first;
      if (low == high) return pivot;
    }
    std::sort(few_.begin() + low, few_.begin() + high, std::greater<float>());
    double sum = 0.0;
    for (size_t i = low; i < high; ++i) {
      sum += few_[i];
      if (sum >= target) return few_[i];
    }
    return few_[high - 1];
  }

  // The first token at which the running sum of the weights that are at least `least` exceeds noise × their sum.
  int pick(float least, double noise) {
    const double total = mass(least);
    const double target = noise * total;
    double sum = 0.0;
    int last = 0;
    for (int b = 0; b * BLOCK < vocab_; ++b) {
      if (blocks_[b] > 0.0) {
        const bool here = sum + blocks_[b] > target;
        double within = sum;
        const int end = std::min((b + 1) * BLOCK, vocab_);
        for (int i = here ? b * BLOCK : end; i < end; ++i) {
          if (!(p_[i] >= least) || p_[i] <= 0.0f) continue;
          within += p_[i];
          last = i;
          if (within > target) return i;
        }
        if (here) return last;  // the block's sum and the sum of its tokens differ in the last digits
      }
      sum += blocks_[b];
    }
    for (int i = vocab_ - 1; i >= 0; --i)
      if (p_[i] >= least && p_[i] > 0.0f) return i;
    return last;
  }

  int vocab_;
  std::vector<float> p_;
  std::vector<double> blocks_;
  std::vector<float> few_;
};

// Run f(scratch, i) for rows i from 0 to `rows`; each thread has a copy of `scratch` to itself.
template <class Scratch, class F>
inline void for_rows(int rows, int threads, const Scratch& scratch, const F& f) {
  threads = std::max(1, std::min(rows, threads));
  std::vector<Scratch> scratches(threads, scratch);
  Pool::instance().run(threads, [&](Team team) { team.queue(rows, [&](int i) { f(scratches[team.thread()], i); }); });
}

inline void draw_rows(const Draws& d) {
  for_rows(d.rows, d.threads, RowSampler(d.vocab), [&](RowSampler& sampler, int i) {
    const float* logits = d.logits + size_t(d.place[i]) * d.vocab;
    d.token_ids[i] = d.greedy[i] ? argmax(logits, d.vocab)
                                 : sampler.draw(logits, d.temperature[i], d.top_k[i], d.top_p[i], d.min_p[i], d.noise[i]);
  });
}

inline void report_row(const Reports& r, int i, std::vector<std::pair<float, int32_t>>& best) {
  const float* x = r.logits + size_t(r.place[i]) * r.vocab;
  const float inf = std::numeric_limits<float>::infinity();
  const float highest = highest_of(x, r.vocab);
  const float own = x[r.token_ids[i]];
  double total = 0.0;
  int above = 0;
  const int wanted = std::min(r.num_top[i], r.vocab);
  // The best so far, in descending order of (logit, -id); what does not beat the last is skipped at once.
  best.clear();
  float bar = -inf;
  for (int b = 0; b < r.vocab; b += BLOCK) {
    vf sum = zero();
    const int count = std::min(BLOCK, r.vocab - b);
    for_vectors(count, [&](int j, int n) {
      const vf value = load_first(x + b + j, n, -inf);
      vf p = exp2(mul(sub(value, set1(highest)), set1(LOG2_E)));
      sum = add(sum, keep_first(p, n, 0.0f));
      above += __builtin_popcount(mask_gt(value, set1(own)));
      if (wanted == 0) return;
      uint32_t mask = int(best.size()) < wanted ? (uint64_t(1) << n) - 1 : mask_gt(value, set1(bar));
      for (; mask; mask &= mask - 1) {
        const int id = b + j + __builtin_ctz(mask);
        const std::pair<float, int32_t> entry{x[id], id};
        if (int(best.size()) == wanted) {
          if (!(entry.first > best.back().first)) continue;
          best.pop_back();
        }
        auto at = std::upper_bound(best.begin(), best.end(), entry,
                                   [](const auto& p, const auto& q) { return p.first > q.first; });
        best.insert(at, entry);
        if (int(best.size()) == wanted) bar = best.back().first;
      }
    });
    total += reduce_add(sum);
  }
  const float log_total = float(std::log(total)) + highest;
  r.logprobs[i] = own - log_total;
  r.ranks[i] = above + 1;
  for (int k = 0; k < wanted; ++k) {
    r.top_ids[size_t(i) * r.max_top + k] = best[k].second;
    r.top_logprobs[size_t(i) * r.max_top + k] = best[k].first - log_total;
  }
}

inline void report_rows(const Reports& r) {
  std::vector<std::pair<float, int32_t>> best;
  for_rows(r.rows, r.threads, best, [&](auto& mine, int i) { report_row(r, i, mine); });
}

// What a row's penalties need, left as it was found.
struct PenaltyScratch {
  std::vector<int32_t> counts;  // [vocab], how often a token is in the output; -1 for one that is done; all 0 between rows
  std::vector<int32_t> seen;
};

// Repetition: over prompt and output, a positive logit is divided, a negative one multiplied (Keskar et al. 2019).
// Presence and frequency: over the output, a constant and a multiple of the count are subtracted.
inline void penalize_row(const Penalties& p, int i, PenaltyScratch& scratch) {
  auto& [counts, seen] = scratch;
  float* logits = p.logits + size_t(p.place[i]) * p.vocab;
  const int32_t* tokens = p.tokens + p.token_rows[i] * p.token_stride;
  for (int t = p.num_prompt_tokens[i]; t < p.num_tokens[i]; ++t) ++counts[tokens[t]];
  const int first = p.repetition[i] != 1.0f ? 0 : p.num_prompt_tokens[i];
  seen.clear();
  for (int t = first; t < p.num_tokens[i]; ++t) {
    const int id = tokens[t];
    if (counts[id] < 0) continue;
    float& x = logits[id];
    if (p.repetition[i] != 1.0f) x = x > 0.0f ? x / p.repetition[i] : x * p.repetition[i];
    if (counts[id] > 0) x -= p.presence[i] + p.frequency[i] * float(counts[id]);
    counts[id] = -1;
    seen.push_back(id);
  }
  for (int id : seen) counts[id] = 0;
}

inline void penalize_rows(const Penalties& p) {
  for_rows(p.rows, p.threads, PenaltyScratch{std::vector<int32_t>(p.vocab, 0), {}},
           [&](PenaltyScratch& scratch, int i) { penalize_row(p, i, scratch); });
}

}  // namespace treadle
