// The left-hand side of a matrix product: rows of activations, narrowed to the type that the weights require.
#pragma once
#include "blocks.h"

namespace treadle {

// How a model's activations are narrowed.
enum Narrowing : int32_t {
  NARROW_BF16,   // for bfloat16 weights
  NARROW_INT8,   // for int8 weights: a scale per group of 64
  NARROW_BLOCKS  // for GGUF's blocks: a scale per group of 32
};

constexpr int PART = 16;  // int8 activations whose sum is kept for NARROW_BLOCKS: the inputs that share a scale in Q6_K

// A row's numbers depend only on that row.
struct Activations {
  act* narrow;     // [rows, k], NARROW_BF16
  int8_t* bytes;   // [rows, k], the others
  float* scales;   // [rows, k / size of a group]
  int32_t* sums;   // of bytes: [rows, k / 64], or for NARROW_BLOCKS [rows, k / 16]
  float* offsets;  // of what bytes stand for, NARROW_BLOCKS: [rows, k / 32]
  int32_t k;
  int32_t narrowing;
};

// Narrow SIZE floats to int8 with one scale, which is returned; sums: [SIZE / STEP].
template <int SIZE, int STEP>
inline float narrow_to_int8(const float* values, int8_t* out, int32_t* sums) {
  vf largest = abs(load(values));
  for (int i = W; i < SIZE; i += W) largest = max(largest, abs(load(values + i)));
  const float top = reduce_max(largest);
  const vf inverse = set1(top > 0.0f ? 127.0f / top : 0.0f);
  for (int s = 0; s < SIZE / STEP; ++s) {
    vi sum = set1_int(0);
    for (int i = s * STEP; i < (s + 1) * STEP; i += W) {
      const vi q = to_int(mul(load(values + i), inverse));
      sum = add_int(sum, q);
      store_int8(out + i, q);
    }
    sums[s] = reduce_add_int(sum);
  }
  return top / 127.0f;
}

// Narrow 64 floats into group `g` of `row`.
inline void narrow_group(const Activations& x, int row, int g, const float* values) {
  const size_t at = size_t(row) * x.k + g * GROUP;
  if (x.narrowing == NARROW_BF16) {
    for (int i = 0; i < GROUP; i += W) store_act(x.narrow + at + i, load(values + i));
  } else if (x.narrowing == NARROW_INT8) {
    x.scales[at / GROUP] = narrow_to_int8<GROUP, GROUP>(values, x.bytes + at, x.sums + at / GROUP);
  } else {
    for (size_t i = 0; i < GROUP; i += BLOCK_GROUP) {
      int32_t* sums = x.sums + (at + i) / PART;
      const float scale = narrow_to_int8<BLOCK_GROUP, PART>(values + i, x.bytes + at + i, sums);
      x.scales[(at + i) / BLOCK_GROUP] = scale;
      x.offsets[(at + i) / BLOCK_GROUP] = scale * float(sums[0] + sums[1]);
    }
  }
}

constexpr int GROUPS_AT_ONCE = 16;  // groups that a thread claims, so that the claim costs little

// Rows of floats [rows, k] → activations.
inline void narrow_rows(Team& team, const Activations& x, const float* values, int rows) {
  const int groups = x.k / GROUP;
  team.loop(
      rows * groups,
      [&](int item) { narrow_group(x, item / groups, item % groups, values + size_t(item) * GROUP); },
      GROUPS_AT_ONCE);
}

}  // namespace treadle
