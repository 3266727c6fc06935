// Attention over the paged cache, for prompts and decodes alike.
//
// A work item is up to MAX_TOKENS consecutive tokens of one sequence and one KV head: its rows are these tokens'
// query heads of that group, which share the keys. The context is walked in tiles of 64 tokens from position 0,
// with the online softmax of FlashAttention (Dao et al. 2022) in base 2. A row's result depends only on
// its own query and context: tiles are fixed, and in a tile of which a row sees nothing, its probabilities are
// exactly 0 and its maximum stays the same, so that the tile changes nothing.
#pragma once
#include <algorithm>
#include <limits>

#include "kv_cache.h"

namespace treadle {

constexpr int TILE = 64;        // tokens of context that are processed together
constexpr int CELLS = TILE / CELL;
constexpr int MAX_ROWS = 64;    // most rows of a work item
constexpr int MAX_TOKENS = 16;  // most tokens of a work item
constexpr float PROBABILITY_STEPS = 127 * 128;
constexpr int CELL_V = CELL / W;  // vectors across a cell's tokens

struct AttentionItem {
  int32_t token;     // first, among the step's tokens
  int32_t count;     // tokens
  int32_t position;  // of the first token in its sequence
  int32_t row;       // of the block tables
  int32_t head;      // KV head
};

// What all items of a layer share.
struct AttentionLayer {
  KVCache kv;
  int layer;
  const int32_t* tables;  // [rows, table_stride]
  int64_t table_stride;
  Queries queries;
  int heads, head_dim;
  float* out;  // [tokens, out_stride], heads side by side
  int64_t out_stride;
};

// One thread's scratch memory for one item.
struct AttentionScratch {
  alignas(64) act narrow[MAX_ROWS * MAX_DIM];
  alignas(64) int8_t bytes[MAX_ROWS * MAX_DIM];
  float scales[MAX_ROWS];
  int32_t corrections[MAX_ROWS];
  alignas(64) float scores[MAX_ROWS * TILE];
  alignas(64) act probabilities[MAX_ROWS * TILE];  // with bfloat16 values
  alignas(64) int8_t high[MAX_ROWS * TILE], low[MAX_ROWS * TILE];  // with int8 values: 128 × high + low
  int32_t high_correction[MAX_ROWS], low_correction[MAX_ROWS];
  float probability_scale[MAX_ROWS];
  alignas(64) float sums[MAX_ROWS * MAX_DIM];
  alignas(64) bf16 values[CELL * MAX_DIM];
  alignas(64) char cells[CELLS][2 * CELL * MAX_DIM * 2 + 2 * CELL * 4];
  float highest[MAX_ROWS], total[MAX_ROWS], decay[MAX_ROWS];
};

// scores[r, 16 × cell + t] = query r · key t, for R rows and as many cells at once as registers allow.
template <int R>
inline void scores_of(const KVCache& kv, char* const* cells, const AttentionScratch& s, int row, float* scores) {
  constexpr int N = ATTENTION_CELLS * CELL_V;
  const int dim = kv.dim;
  for (int first = 0; first < CELLS; first += ATTENTION_CELLS) {
    const char* keys_at[N];
    for (int v = 0; v < N; ++v) keys_at[v] = cells[first + v / CELL_V] + v % CELL_V * W * 4;
    vf out[R][N];
    if (kv.is_int8) {
      vi sums[R][N];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) sums[r][v] = set1_int(s.corrections[row + r]);
      const int8_t* queries = s.bytes + row * dim;
      for (int d = 0; d < dim; d += 4) {
        w4 keys[N];
        for (int v = 0; v < N; ++v) keys[v] = load_w4(keys_at[v] + d * CELL);
        for (int r = 0; r < R; ++r)
          for (int v = 0; v < N; ++v) sums[r][v] = dot4(sums[r][v], keys[v], queries + r * dim + d);
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) {
          const vf scale = load(kv.key_scales(cells[first + v / CELL_V]) + v % CELL_V * W);
          out[r][v] = mul(mul(to_float(sums[r][v]), set1(s.scales[row + r])), scale);
        }
    } else {
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) out[r][v] = zero();
      const act* queries = s.narrow + row * dim;
      for (int d = 0; d < dim; d += 2) {
        w2 keys[N];
        for (int v = 0; v < N; ++v) keys[v] = load_w2(reinterpret_cast<const bf16*>(keys_at[v]) + d * CELL);
        for (int r = 0; r < R; ++r)
          for (int v = 0; v < N; ++v) out[r][v] = dot2(out[r][v], keys[v], queries + r * dim + d);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < N; ++v) store(scores + (row + r) * TILE + first * CELL + v * W, out[r][v]);
  }
}

// sums[r] = sums[r] × decay[r] + Σ probability × value over the first 2 × pairs tokens of a tile.
// values: for each cell [8][dim][2].
template <int R, int N>
inline void weigh(const bf16* const* values, int dim, int pairs, int row, int d, AttentionScratch& s) {
  vf sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < N; ++v)
      sums[r][v] = mul(load(s.sums + (row + r) * dim + d + v * W), set1(s.decay[row + r]));
  for (int c = 0; c * (CELL / 2) < pairs; ++c) {
    const bf16* at = values[c] + d * 2;
    const act* p = s.probabilities + row * TILE + c * CELL;
    const int count = std::min(CELL / 2, pairs - c * (CELL / 2));
    for (int pair = 0; pair < count; ++pair, at += dim * 2, p += 2) {
      w2 ws[N];
      for (int v = 0; v < N; ++v) ws[v] = load_w2(at + v * W * 2);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) sums[r][v] = dot2(sums[r][v], ws[v], p + r * TILE);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < N; ++v) store(s.sums + (row + r) * dim + d + v * W, sums[r][v]);
}

// The same with int8 values [4][dim][4] per cell. Probabilities, times the values' scales, are integers of 14 bits in two
// halves of 7, relative to the largest of the row in this tile: a single half would round small ones beside a large
// one to zero. Two exact integer products give each sum.
template <int R, int N>
inline void weigh_int8(const KVCache& kv, char* const* cells, int quads, int row, int d, AttentionScratch& s) {
  const int dim = kv.dim;
  vi high[R][N], low[R][N];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < N; ++v) {
      high[r][v] = set1_int(s.high_correction[row + r]);
      low[r][v] = set1_int(s.low_correction[row + r]);
    }
  for (int c = 0; c * (CELL / 4) < quads; ++c) {
    const int8_t* at = kv.values8(cells[c]) + d * 4;
    const int count = std::min(CELL / 4, quads - c * (CELL / 4));
    for (int quad = 0; quad < count; ++quad, at += dim * 4) {
      w4 ws[N];
      for (int v = 0; v < N; ++v) ws[v] = load_w4(at + v * W * 4);
      for (int r = 0; r < R; ++r) {
        const int p = (row + r) * TILE + c * CELL + quad * 4;
        for (int v = 0; v < N; ++v) high[r][v] = dot4(high[r][v], ws[v], s.high + p);
        for (int v = 0; v < N; ++v) low[r][v] = dot4(low[r][v], ws[v], s.low + p);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < N; ++v) {
      float* sum = s.sums + (row + r) * dim + d + v * W;
      const vf total = to_float(add_int(shift_left_7(high[r][v]), low[r][v]));
      store(sum, fma(total, set1(s.probability_scale[row + r]), mul(load(sum), set1(s.decay[row + r]))));
    }
}

// How many vectors of a row `weigh_int8` takes at once: two sums for each must fit into registers.
constexpr int int8_vectors(int rows) { return ATTENTION_V == 4 && rows <= 3 ? 4 : ATTENTION_V == 4 ? 2 : 1; }

template <class Run>
inline void for_row_tiles(int rows, const Run& run) {
  const int tiles = (rows + ATTENTION_ROWS - 1) / ATTENTION_ROWS;
  for (int t = 0; t < tiles; ++t) {
    const int row = rows * t / tiles, count = rows * (t + 1) / tiles - row;
    with_count<ATTENTION_ROWS>(count, [&](auto known) { run(row, known); });
  }
}

// Scores of a tile → probabilities relative to the highest score so far; also stores the sums' decay.
// visible: how many of the tile's tokens the row may see. value_scales: [64] with int8 values, else null.
inline void soften(AttentionScratch& s, int row, int visible, const float* value_scales) {
  constexpr int N = TILE / W;
  constexpr float never = -std::numeric_limits<float>::infinity();
  vf p[N];
  vf top = set1(never);
  for (int v = 0; v < N; ++v) {
    p[v] = keep_first(load(s.scores + row * TILE + v * W), visible - v * W, never);
    top = max(top, p[v]);
  }
  const float highest = std::fmax(s.highest[row], reduce_max(top));
  alignas(64) float decay[W];
  store(decay, exp2(set1(s.highest[row] - highest)));
  vf sum = zero();
  for (int v = 0; v < N; ++v) {
    p[v] = keep_first(exp2(sub(p[v], set1(highest))), visible - v * W, 0.0f);
    sum = add(sum, p[v]);
  }
  s.decay[row] = decay[0];
  s.total[row] = __builtin_fmaf(s.total[row], decay[0], reduce_add(sum));
  s.highest[row] = highest;
  if (!value_scales) {
    for (int v = 0; v < N; ++v) store_act(s.probabilities + row * TILE + v * W, p[v]);
    return;
  }
  vf largest = zero();
  for (int v = 0; v < N; ++v) {
    p[v] = keep_first(mul(p[v], load(value_scales + v * W)), visible - v * W, 0.0f);
    largest = max(largest, p[v]);
  }
  const float most = reduce_max(largest);
  const vf inverse = set1(most > 0.0f ? PROBABILITY_STEPS / most : 0.0f);
  vi high_sum = set1_int(0), low_sum = set1_int(0);
  for (int v = 0; v < N; ++v) {
    const vi q = to_int(mul(p[v], inverse)), high = shift_right_7(q), low = last_7(q);
    high_sum = add_int(high_sum, high);
    low_sum = add_int(low_sum, low);
    store_int8(s.high + row * TILE + v * W, high);
    store_int8(s.low + row * TILE + v * W, low);
  }
  s.high_correction[row] = -WEIGHT_BIAS * reduce_add_int(high_sum);
  s.low_correction[row] = -WEIGHT_BIAS * reduce_add_int(low_sum);
  s.probability_scale[row] = most / PROBABILITY_STEPS;
}

// Iterates over the cells of a sequence without a division for each.
class CellWalk {
 public:
  CellWalk(const KVCache& kv, int layer, int head, const int32_t* table)
      : base_(kv.cell(layer, 0, head, 0)), block_bytes_(kv.block_bytes()), cell_bytes_(kv.cell_bytes()),
        cells_(int(kv.cells_per_block())), table_(table) {}
  char* next() {
    char* cell = base_ + *table_ * block_bytes_ + at_ * cell_bytes_;
    if (++at_ == cells_) {
      at_ = 0;
      ++table_;
    }
    return cell;
  }

 private:
  char* base_;
  int64_t block_bytes_, cell_bytes_;
  int cells_, at_ = 0;
  const int32_t* table_;
};

inline void attend(const AttentionLayer& layer, const AttentionItem& item, AttentionScratch& s) {
  const KVCache& kv = layer.kv;
  const int group = layer.heads / kv.kv_heads, rows = item.count * group, dim = kv.dim;
  const int end = item.position + item.count;  // tokens of context, all written
  const int32_t* table = layer.tables + item.row * layer.table_stride;
  for (int r = 0; r < rows; ++r) {
    const int64_t at = int64_t(item.token + r / group) * layer.heads + item.head * group + r % group;
    if (kv.is_int8) {
      std::memcpy(s.bytes + r * dim, layer.queries.bytes + at * dim, dim);
      s.scales[r] = layer.queries.scales[at];
      s.corrections[r] = layer.queries.corrections[at];
    } else {
      std::memcpy(s.narrow + r * dim, layer.queries.narrow + at * dim, dim * sizeof(act));
    }
    s.highest[r] = -std::numeric_limits<float>::infinity();
    s.total[r] = 0.0f;
  }
  std::memset(s.sums, 0, size_t(rows) * dim * sizeof(float));
  CellWalk walk(kv, layer.layer, item.head, table);
  for (int start = 0; start < end; start += TILE) {
    const int written = std::min(TILE, end - start);
    char* cells[CELLS];
    for (int c = 0; c < CELLS; ++c) {
      const int position = start + c * CELL;
      if (position >= end) {
        cells[c] = cells[0];  // invisible to all rows
      } else if (kv.block_size % CELL == 0) {
        cells[c] = walk.next();
      } else {
        cells[c] = s.cells[c];
        for (int i = position; i < std::min(position + CELL, end); ++i) {
          const int slot = i % kv.block_size;
          char* from = kv.cell(layer.layer, table[i / kv.block_size], item.head, slot);
          copy_token(kv, from, slot % CELL, cells[c], i - position);
        }
      }
    }
    for_row_tiles(rows, [&](int row, auto count) {
      scores_of<decltype(count)::value>(kv, cells, s, row, s.scores);
    });
    alignas(64) float value_scales[TILE];
    if (kv.is_int8)
      for (int c = 0; c < CELLS; ++c) std::memcpy(value_scales + c * CELL, kv.value_scales(cells[c]), CELL * 4);
    for (int r = 0; r < rows; ++r)
      soften(s, r, item.position + r / group + 1 - start, kv.is_int8 ? value_scales : nullptr);
    if (kv.is_int8) {
      for_row_tiles(rows, [&](int row, auto count) {
        constexpr int R = decltype(count)::value, N = int8_vectors(R);
        int d = 0;
        for (; d + N * W <= dim; d += N * W) weigh_int8<R, N>(kv, cells, (written + 3) / 4, row, d, s);
        for (; d < dim; d += W) weigh_int8<R, 1>(kv, cells, (written + 3) / 4, row, d, s);
      });
      continue;
    }
    // If the last token is the first of a pair, the second one is zeroed: its slot may hold anything.
    const bf16* values[CELLS];
    for (int c = 0; c < CELLS; ++c) values[c] = kv.values(cells[c]);
    if (written % 2) {
      const int c = written / CELL;
      const int whole = written % CELL / 2;  // pairs before the last
      std::memcpy(s.values, values[c], size_t(whole) * dim * 2 * sizeof(bf16));
      const bf16* from = values[c] + size_t(whole) * dim * 2;
      for (int d = 0; d < dim; d += W)
        store_int(s.values + size_t(whole) * dim * 2 + d * 2, keep_even(load_int(from + d * 2)));
      values[c] = s.values;
    }
    for_row_tiles(rows, [&](int row, auto count) {
      constexpr int R = decltype(count)::value, N = ATTENTION_V;
      int d = 0;
      for (; d + N * W <= dim; d += N * W) weigh<R, N>(values, dim, (written + 1) / 2, row, d, s);
      for (; d < dim; d += W) weigh<R, 1>(values, dim, (written + 1) / 2, row, d, s);
    });
  }
  for (int r = 0; r < rows; ++r) {
    const float inverse = 1.0f / s.total[r];
    float* out = layer.out + (item.token + r / group) * layer.out_stride + (item.head * group + r % group) * layer.head_dim;
    for (int d = 0; d < layer.head_dim; ++d) out[d] = s.sums[r * dim + d] * inverse;
  }
}

inline int tokens_per_item(int group) { return std::max(1, std::min(MAX_TOKENS, MAX_ROWS / group)); }

}  // namespace treadle
