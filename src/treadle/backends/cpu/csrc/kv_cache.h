// The paged KV cache, and how a token's key and value are stored in it.
//
// A block holds all layers side by side, so that a sequence's memory is compact, and cells of 16 tokens for each
// layer and KV head. A cell is laid out as attention reads it:
//   keys    as the panel of a matrix product whose columns are the 16 tokens: int8 [D/4][16][4], bf16 [D/2][16][2]
//   values  as one whose inputs are the tokens: int8 [4][D][4], bf16 [8][D][2]
//   scales  int8 only: float [16] for keys, [16] for values, one per token and head
// D is head_dim padded to a multiple of 16 with zeros. Blocks are padded to a multiple of 16 tokens.
#pragma once
#include "norm.h"

namespace treadle {

constexpr int CELL = 16;      // tokens in a cell
constexpr int MAX_DIM = 256;  // of a head

struct KVCache {
  char* base;  // [blocks][layers][kv_heads][cells of a block] of cells
  int64_t layers;
  int32_t block_size;  // tokens
  int32_t kv_heads;
  int32_t dim;  // padded head_dim
  int32_t is_int8;

  int64_t keys_bytes() const { return int64_t(CELL) * dim * (is_int8 ? 1 : 2); }
  int64_t cell_bytes() const { return 2 * keys_bytes() + (is_int8 ? 2 * CELL * 4 : 0); }
  int64_t cells_per_block() const { return (block_size + CELL - 1) / CELL; }
  int64_t layer_bytes() const { return kv_heads * cells_per_block() * cell_bytes(); }  // one layer of a block
  int64_t block_bytes() const { return layers * layer_bytes(); }
  // The cell that holds the token in slot `slot` of a block.
  char* cell(int layer, int64_t block, int head, int slot) const {
    return base + block * block_bytes() + layer * layer_bytes() +
           (head * cells_per_block() + slot / CELL) * cell_bytes();
  }
  bf16* values(char* cell) const { return reinterpret_cast<bf16*>(cell + keys_bytes()); }
  int8_t* values8(char* cell) const { return reinterpret_cast<int8_t*>(cell + keys_bytes()); }
  float* key_scales(char* cell) const { return reinterpret_cast<float*>(cell + 2 * keys_bytes()); }
  float* value_scales(char* cell) const { return key_scales(cell) + CELL; }
};

// Write one token's key and value of one head, both [dim] floats, into lane `lane` of a cell.
inline void store_token(const KVCache& kv, char* cell, int lane, const float* key, const float* value) {
  if (!kv.is_int8) {
    bf16* keys = reinterpret_cast<bf16*>(cell);
    bf16* values = kv.values(cell) + size_t(lane / 2) * kv.dim * 2 + lane % 2;
    for (int d = 0; d < kv.dim; d += 2) {
      keys[((d / 2) * CELL + lane) * 2] = float_to_bf16(key[d]);
      keys[((d / 2) * CELL + lane) * 2 + 1] = float_to_bf16(key[d + 1]);
    }
    for (int d = 0; d < kv.dim; ++d) values[d * 2] = float_to_bf16(value[d]);
    return;
  }
  int8_t* keys = reinterpret_cast<int8_t*>(cell);
  int8_t* values = kv.values8(cell) + size_t(lane / 4) * kv.dim * 4 + lane % 4;
  const float top_key = largest_magnitude(key, kv.dim), top_value = largest_magnitude(value, kv.dim);
  const float to_key = top_key > 0.0f ? 127.0f / top_key : 0.0f;
  const float to_value = top_value > 0.0f ? 127.0f / top_value : 0.0f;
  alignas(64) int8_t narrow[MAX_DIM], narrow_value[MAX_DIM];
  for (int d = 0; d < kv.dim; d += W) {
    store_int8(narrow + d, to_int(mul(load(key + d), set1(to_key))));
    store_int8(narrow_value + d, to_int(mul(load(value + d), set1(to_value))));
  }
  for (int d = 0; d < kv.dim; ++d) values[d * 4] = int8_t(narrow_value[d] + WEIGHT_BIAS);
  for (int d = 0; d < kv.dim; d += 4)
    for (int j = 0; j < 4; ++j) keys[((d / 4) * CELL + lane) * 4 + j] = int8_t(narrow[d + j] + WEIGHT_BIAS);
  kv.key_scales(cell)[lane] = top_key / 127.0f;
  kv.value_scales(cell)[lane] = top_value / 127.0f;
}

// Copy one token from a lane of one cell to a lane of another.
inline void copy_token(const KVCache& kv, char* from, int from_lane, char* to, int to_lane) {
  if (kv.is_int8) {
    for (int d = 0; d < kv.dim / 4; ++d) std::memcpy(to + (d * CELL + to_lane) * 4, from + (d * CELL + from_lane) * 4, 4);
    const int8_t* source = kv.values8(from) + size_t(from_lane / 4) * kv.dim * 4 + from_lane % 4;
    int8_t* target = kv.values8(to) + size_t(to_lane / 4) * kv.dim * 4 + to_lane % 4;
    for (int d = 0; d < kv.dim; ++d) target[d * 4] = source[d * 4];
    kv.key_scales(to)[to_lane] = kv.key_scales(from)[from_lane];
    kv.value_scales(to)[to_lane] = kv.value_scales(from)[from_lane];
  } else {
    for (int d = 0; d < kv.dim / 2; ++d) std::memcpy(to + (d * CELL + to_lane) * 4, from + (d * CELL + from_lane) * 4, 4);
    const bf16* source = kv.values(from) + size_t(from_lane / 2) * kv.dim * 2 + from_lane % 2;
    bf16* target = kv.values(to) + size_t(to_lane / 2) * kv.dim * 2 + to_lane % 2;
    for (int d = 0; d < kv.dim; ++d) target[d * 2] = source[d * 2];
  }
}

// Queries as attention multiplies them: with bfloat16 keys narrow [tokens, heads, dim]; with int8 keys bytes of
// the same shape, and for each token and head a scale and the start value of an integer sum.
struct Queries {
  act* narrow;
  int8_t* bytes;
  float* scales;         // [tokens, heads]
  int32_t* corrections;  // [tokens, heads]
};

// Normalize a head if the model does so (weight is not null), then rotate pairs (i, i + D/2) by the position's
// angles (Su et al. 2021): in [head_dim] → out [dim], padded with zeros.
inline void rotate_head(const float* in, int head_dim, int dim, const float* weight, float eps, const float* cosines,
                        const float* sines, float* out) {
  alignas(64) float x[MAX_DIM];
  std::memcpy(x, in, head_dim * sizeof(float));
  if (weight) {
    std::memset(x + head_dim, 0, (round_up(head_dim, GROUP) - head_dim) * sizeof(float));
    const float scale = inverse_rms(x, head_dim, eps);
    for (int i = 0; i < head_dim; ++i) x[i] = x[i] * scale * weight[i];
  }
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    out[i] = x[i] * cosines[i] - x[i + half] * sines[i];
    out[i + half] = x[i + half] * cosines[i] + x[i] * sines[i];
  }
  for (int i = head_dim; i < dim; ++i) out[i] = 0.0f;
}

// Narrow one head's query [dim], already multiplied by the softmax scale, into place `at` of the queries.
inline void store_query(const Queries& q, int64_t at, int dim, bool is_int8, const float* query) {
  if (!is_int8) {
    for (int d = 0; d < dim; d += W) store_act(q.narrow + at * dim + d, load(query + d));
    return;
  }
  const float top = largest_magnitude(query, dim);
  const vf inverse = set1(top > 0.0f ? 127.0f / top : 0.0f);
  int32_t total = 0;
  int8_t* out = q.bytes + at * dim;
  for (int d = 0; d < dim; d += W) store_int8(out + d, to_int(mul(load(query + d), inverse)));
  for (int d = 0; d < dim; ++d) total += out[d];
  q.scales[at] = top / 127.0f;
  q.corrections[at] = -WEIGHT_BIAS * total;
}

}  // namespace treadle
