// A step of the whole model: one region of the pool over all layers.
#pragma once
#include <memory>
#include <new>
#include <vector>

#include "attention.h"
#include "gemm.h"

namespace treadle {

extern "C" {

// Mirrored by treadle.backends.cpu.library; sizes are the model's, without padding unless noted.
struct Layer {
  const float* input_norm;  // [padded hidden]
  Weights q, k, v;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  Weights o;
  const float* post_norm;
  Weights gate, up, down;
  const float* cosines;  // [positions, head_dim / 2]
  const float* sines;
};

struct Model {
  int32_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocab;
  int32_t narrowing;  // of activations, as the formats of all weights but `embedding` need it
  float eps;
  Weights embedding;
  const Layer* layer;
  const float* norm;
  Weights head;
};

struct Step {
  const int32_t* token_ids;  // [tokens]
  const int32_t* positions;  // [tokens]
  const int32_t* rows;       // [tokens], of the block tables
  const int32_t* tables;     // [.., table_stride]
  const int32_t* run_start;  // [runs]: consecutive tokens of one sequence
  const int32_t* run_count;  // [runs]
  int64_t table_stride;
  int32_t tokens, runs, threads;
};

}  // extern "C"

// Memory that is kept from step to step and grows when a step needs more; std::bad_alloc if that fails.
template <class T>
class Buffer {
 public:
  T* get(size_t count) {
    if (count > size_) {
      T* const data = static_cast<T*>(std::aligned_alloc(64, round_up(count * sizeof(T), 64)));
      if (data == nullptr) throw std::bad_alloc();
      std::memset(data, 0, count * sizeof(T));
      data_.reset(data);
      size_ = count;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  size_t size_ = 0;
};

// Buffers for activations of up to `rows` rows of up to `k` columns.
class ActivationBuffer {
 public:
  Activations get(size_t rows, int64_t k, int32_t narrowing) {
    Activations x{nullptr, nullptr, nullptr, nullptr, nullptr, int32_t(k), narrowing};
    if (narrowing == NARROW_BF16) {
      x.narrow = narrow_.get(rows * k);
      return x;
    }
    x.bytes = bytes_.get(rows * k);
    x.scales = scales_.get(rows * (k / BLOCK_GROUP));
    x.sums = sums_.get(rows * (k / PART));
    x.offsets = offsets_.get(rows * (k / BLOCK_GROUP));
    return x;
  }

 private:
  Buffer<act> narrow_;
  Buffer<int8_t> bytes_;
  Buffer<float> scales_, offsets_;
  Buffer<int32_t> sums_;
};

// The highest logit of a row and the lowest id that has it.
struct Best {
  float value;
  int32_t id;
};

// The epilogue of the output projection: records the best token of each row, and stores requested logits.
struct Logits {
  float* out;            // [.., vocab]
  const int32_t* place;  // [rows]: the row's place in `out`, or -1
  Best* best;            // [rows], the thread's own
  int vocab;
  void operator()(int row, int rows, int panel, float* tile) const {
    const int first = panel * PANEL, count = std::min(PANEL, vocab - first);
    for (int r = 0; r < rows; ++r) {
      const float* values = tile + r * PANEL;
      if (place[row + r] >= 0) std::memcpy(out + size_t(place[row + r]) * vocab + first, values, count * sizeof(float));
      vf top = set1(-std::numeric_limits<float>::infinity());
      for (int c = 0; c < PANEL; c += W)
        top = max(keep_first(load(values + c), count - c, -std::numeric_limits<float>::infinity()), top);
      const float highest = reduce_max(top);
      Best& b = best[row + r];
      if (!(highest > b.value)) continue;
      int c = 0;
      while (values[c] != highest) ++c;
      b = {highest, first + c};
    }
  }
};

class Engine {
 public:
  Engine(const Model& model, const KVCache& kv) : m_(model), kv_(kv), layers_(model.layer, model.layer + model.layers) {
    m_.layer = layers_.data();
  }

  void forward(const Step& step) {
    const int T = step.tokens;
    const int64_t hidden = round_up(m_.hidden, GROUP), inter = round_up(m_.intermediate, GROUP);
    const int64_t width = int64_t(m_.heads) * m_.head_dim, attended = round_up(width, GROUP);
    const int64_t qkv_width = q_width() + 2 * kv_width();
    const int32_t narrowing = m_.narrowing;
    hidden_ = hidden_buffer_.get(T * hidden);
    float* qkv = qkv_.get(T * qkv_width);
    float* out = attended_.get(T * attended);
    float* product = product_.get(T * inter);
    const Activations x = x_.get(T, hidden, narrowing), a = a_.get(T, attended, narrowing),
                      p = p_.get(T, inter, narrowing);
    Queries q{nullptr, nullptr, nullptr, nullptr};
    if (kv_.is_int8) {
      q.bytes = query_bytes_.get(size_t(T) * m_.heads * kv_.dim);
      q.scales = query_scales_.get(size_t(T) * m_.heads);
      q.corrections = query_corrections_.get(size_t(T) * m_.heads);
    } else {
      q.narrow = query_narrow_.get(size_t(T) * m_.heads * kv_.dim);
    }
    if (attended > width)  // no head writes the columns of the padding
      for (int t = 0; t < T; ++t) std::memset(out + t * attended + width, 0, (attended - width) * sizeof(float));
    make_items(step);
    AttentionLayer attention{kv_, 0, step.tables, step.table_stride, q, m_.heads, m_.head_dim, out, attended};
    if (scratch_.size() < size_t(step.threads)) scratch_.resize(step.threads);
    for (auto& s : scratch_)
      if (!s) s = std::make_unique<AttentionScratch>();

    Pool::instance().run(step.threads, [&](Team team) {
      AttentionScratch& scratch = *scratch_[team.thread()];
      AttentionLayer mine = attention;
      team.loop(T, [&](int t) { unpack_row(m_.embedding, step.token_ids[t], hidden_ + t * hidden); });
      for (int i = 0; i < m_.layers; ++i) {
        const Layer& layer = m_.layer[i];
        norm_rows(team, x, T, layer.input_norm);
        const int stride = int(qkv_width);
        gemm<Store, 3>(team, x, T,
                       {{layer.q, {qkv, stride, layer.q.bias}},
                        {layer.k, {qkv + q_width(), stride, layer.k.bias}},
                        {layer.v, {qkv + q_width() + kv_width(), stride, layer.v.bias}}});
        team.loop(T, [&](int t) { rotate_and_store(step, layer, i, t, qkv + t * qkv_width, q); });
        mine.layer = i;
        team.queue(int(items_.size()), [&](int n) { attend(mine, items_[n], scratch); });
        narrow_rows(team, a, out, T);
        gemm<Add, 1>(team, a, T, {{layer.o, {hidden_, int(hidden), layer.o.bias}}});
        norm_rows(team, x, T, layer.post_norm);
        gemm_silu_mul(team, x, T, layer.gate, layer.up, product, int(inter));
        narrow_rows(team, p, product, T);
        gemm<Add, 1>(team, p, T, {{layer.down, {hidden_, int(hidden), layer.down.bias}}});
      }
    });
  }

  // For `count` tokens of the last step: the most likely next token, and logits for those with place ≥ 0.
  void logits(const int32_t* tokens, int count, const int32_t* place, float* out, int32_t* best_ids, int threads) {
    const int64_t hidden = round_up(m_.hidden, GROUP);
    const Activations x = x_.get(count, hidden, m_.narrowing);
    Best* best = best_.get(size_t(count) * threads);
    for (int i = 0; i < count * threads; ++i) best[i] = {-std::numeric_limits<float>::infinity(), 0};
    Pool::instance().run(threads, [&](Team team) {
      Best* mine = best + size_t(count) * team.thread();
      team.loop(count, [&](int i) { norm_row(x, i, hidden_ + tokens[i] * hidden, m_.hidden, m_.norm, m_.eps); });
      gemm<Logits, 1>(team, x, count, {{m_.head, {out, place, mine, m_.vocab}}});
    });
    for (int i = 0; i < count; ++i) {
      Best b = best[i];
      for (int t = 1; t < threads; ++t) {
        const Best other = best[size_t(t) * count + i];
        if (other.value > b.value || (other.value == b.value && other.id < b.id)) b = other;
      }
      best_ids[i] = b.id;
    }
  }

 private:
  void norm_rows(Team& team, const Activations& x, int rows, const float* weight) const {
    const int64_t hidden = round_up(m_.hidden, GROUP);
    team.loop(rows, [&](int t) { norm_row(x, t, hidden_ + t * hidden, m_.hidden, weight, m_.eps); });
  }

  // Columns of the queries, and of the keys or the values, in a row of the buffer that the three share.
  int64_t q_width() const { return round_up(int64_t(m_.heads) * m_.head_dim, PANEL); }
  int64_t kv_width() const { return round_up(int64_t(m_.kv_heads) * m_.head_dim, PANEL); }

  // Normalize and rotate one token's queries and keys, and store them and its values where attention reads them.
  void rotate_and_store(const Step& step, const Layer& layer, int i, int t, const float* qkv, const Queries& q) const {
    const int D = m_.head_dim, position = step.positions[t];
    const float* cosines = layer.cosines + int64_t(position) * (D / 2);
    const float* sines = layer.sines + int64_t(position) * (D / 2);
    const float softmax_scale = LOG2_E / std::sqrt(float(D));
    alignas(64) float head[MAX_DIM], value[MAX_DIM] = {};
    for (int h = 0; h < m_.heads; ++h) {
      rotate_head(qkv + h * D, D, kv_.dim, layer.q_norm, m_.eps, cosines, sines, head);
      for (int d = 0; d < kv_.dim; ++d) head[d] *= softmax_scale;
      store_query(q, int64_t(t) * m_.heads + h, kv_.dim, kv_.is_int8, head);
    }
    const int block = step.tables[step.rows[t] * step.table_stride + position / kv_.block_size];
    const int slot = position % kv_.block_size;
    const float *keys = qkv + q_width(), *values = keys + kv_width();
    for (int h = 0; h < m_.kv_heads; ++h) {
      rotate_head(keys + h * D, D, kv_.dim, layer.k_norm, m_.eps, cosines, sines, head);
      std::memcpy(value, values + h * D, D * sizeof(float));
      store_token(kv_, kv_.cell(i, block, h, slot), slot % CELL, head, value);
    }
  }

  void make_items(const Step& step) {
    items_.clear();
    const int group = m_.heads / m_.kv_heads, most = tokens_per_item(group);
    for (int r = 0; r < step.runs; ++r) {
      const int token = step.run_start[r], count = step.run_count[r];
      for (int first = 0; first < count; first += most)
        for (int h = 0; h < m_.kv_heads; ++h)
          items_.push_back({token + first, std::min(most, count - first), step.positions[token + first],
                            step.rows[token], h});
    }
    auto cost = [](const AttentionItem& x) { return int64_t(x.position / TILE + 1) * (x.count + 2); };
    std::stable_sort(items_.begin(), items_.end(),
                     [&](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
  }

  Model m_;
  KVCache kv_;
  std::vector<Layer> layers_;
  std::vector<AttentionItem> items_;
  std::vector<std::unique_ptr<AttentionScratch>> scratch_;
  float* hidden_ = nullptr;  // [tokens, padded hidden] of the last step
  Buffer<float> hidden_buffer_, qkv_, attended_, product_, query_scales_;
  Buffer<act> query_narrow_;
  Buffer<int8_t> query_bytes_;
  Buffer<int32_t> query_corrections_;
  Buffer<Best> best_;
  ActivationBuffer x_, a_, p_;
};

}  // namespace treadle
