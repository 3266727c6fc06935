// The kernels one operation at a time, for tests against their torch counterparts. Compiled beside the library, over the
// same headers; not part of it.
#include "step.h"

using namespace treadle;

namespace {

// x [rows, columns], padded and narrowed for `w`; `run` gets the team and the activations.
template <class Run>
void with_activations(const Weights& w, const float* x, int rows, int columns, int threads, const Run& run) {
  ActivationBuffer buffer;
  Buffer<float> padded;
  const int32_t narrowing = w.format == BF16 ? NARROW_BF16 : w.format == INT8 ? NARROW_INT8 : NARROW_BLOCKS;
  const Activations a = buffer.get(rows, w.k, narrowing);
  float* values = padded.get(size_t(rows) * w.k);
  for (int r = 0; r < rows; ++r) std::memcpy(values + size_t(r) * w.k, x + size_t(r) * columns, columns * sizeof(float));
  Pool::instance().run(threads, [&](Team team) {
    narrow_rows(team, a, values, rows);
    run(team, a);
  });
}

}  // namespace

extern "C" {

// x: [rows, columns] floats, out: [rows, padded n].
void treadle_op_linear(const Weights* w, const float* x, int32_t rows, int32_t columns, float* out, int32_t threads) {
  with_activations(*w, x, rows, columns, threads, [&](Team team, const Activations& a) {
    gemm<Store, 1>(team, a, rows, {{*w, {out, w->n, w->bias}}});
  });
}

// out: silu(x gateᵀ) × x upᵀ, [rows, padded n].
void treadle_op_linear_silu_mul(const Weights* gate, const Weights* up, const float* x, int32_t rows, int32_t columns,
                                float* out, int32_t threads) {
  with_activations(*gate, x, rows, columns, threads, [&](Team team, const Activations& a) {
    gemm_silu_mul(team, a, rows, *gate, *up, out, gate->n);
  });
}

// Row `index` of a matrix as floats, out: [padded k].
void treadle_op_unpack_row(const Weights* w, int32_t index, float* out) { unpack_row(*w, index, out); }

// x, weight, out: [columns]; the result as the next product sees it (narrowed and widened again).
void treadle_op_rms_norm(const float* x, const float* weight, int32_t columns, float eps, int32_t narrowing, float* out) {
  ActivationBuffer buffer;
  Buffer<float> in, scale;
  const int k = int(round_up(columns, GROUP));
  const Activations a = buffer.get(1, k, narrowing);
  std::memcpy(in.get(k), x, columns * sizeof(float));
  std::memcpy(scale.get(k), weight, columns * sizeof(float));
  norm_row(a, 0, in.get(k), columns, scale.get(k), eps);
  const int group = narrowing == NARROW_INT8 ? GROUP : BLOCK_GROUP;
  for (int i = 0; i < columns; ++i)
    out[i] = narrowing == NARROW_BF16 ? from_act(a.narrow[i]) : float(a.bytes[i]) * a.scales[i / group];
}

// in, out: [heads, head_dim]; weight [head_dim] or null; cosines, sines: [head_dim / 2].
void treadle_op_rotary(const float* in, int32_t heads, int32_t head_dim, const float* weight, float eps,
                       const float* cosines, const float* sines, float* out) {
  alignas(64) float head[MAX_DIM];
  for (int h = 0; h < heads; ++h) {
    rotate_head(in + h * head_dim, head_dim, int(round_up(head_dim, CELL)), weight, eps, cosines, sines, head);
    std::memcpy(out + h * head_dim, head, head_dim * sizeof(float));
  }
}

// Write keys and values [tokens, kv_heads, head_dim] of tokens at `positions` of table row 0, layer 0.
void treadle_op_store_kv(const KVCache* kv, const int32_t* table, const int32_t* positions, int32_t tokens,
                         int32_t head_dim, const float* keys, const float* values) {
  for (int t = 0; t < tokens; ++t)
    for (int h = 0; h < kv->kv_heads; ++h) {
      alignas(64) float key[MAX_DIM] = {}, value[MAX_DIM] = {};
      const size_t at = (size_t(t) * kv->kv_heads + h) * head_dim;
      std::memcpy(key, keys + at, head_dim * sizeof(float));
      std::memcpy(value, values + at, head_dim * sizeof(float));
      const int slot = positions[t] % kv->block_size;
      store_token(*kv, kv->cell(0, table[positions[t] / kv->block_size], h, slot), slot % CELL, key, value);
    }
}

// Attention of the tokens at positions first, first + 1, … of table row 0, layer 0.
// queries, out: [tokens, heads, head_dim]; per_item: most tokens of a work item.
void treadle_op_attention(const KVCache* kv, const int32_t* table, int32_t first, int32_t tokens, int32_t heads,
                          int32_t head_dim, int32_t per_item, const float* queries, float* out) {
  Buffer<act> narrow;
  Buffer<int8_t> bytes;
  Buffer<float> scales;
  Buffer<int32_t> corrections;
  const size_t rows = size_t(tokens) * heads;
  const Queries q{narrow.get(rows * kv->dim), bytes.get(rows * kv->dim), scales.get(rows), corrections.get(rows)};
  const float softmax_scale = LOG2_E / std::sqrt(float(head_dim));
  for (size_t r = 0; r < rows; ++r) {
    alignas(64) float head[MAX_DIM] = {};
    for (int d = 0; d < head_dim; ++d) head[d] = queries[r * head_dim + d] * softmax_scale;
    store_query(q, r, kv->dim, kv->is_int8, head);
  }
  const AttentionLayer layer{*kv, 0, table, 0, q, heads, head_dim, out, int64_t(heads) * head_dim};
  auto scratch = std::make_unique<AttentionScratch>();
  const int most = std::min(per_item, tokens_per_item(heads / kv->kv_heads));
  for (int t = 0; t < tokens; t += most)
    for (int h = 0; h < kv->kv_heads; ++h) attend(layer, {t, std::min(most, tokens - t), first + t, 0, h}, *scratch);
}

}  // extern "C"
