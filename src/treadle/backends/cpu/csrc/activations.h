// The left-hand side of a matrix product: rows of activations, narrowed to the type that the weights require.
#pragma once
#include "pack.h"
#include "pool.h"

namespace treadle {

// For bfloat16 weights: `narrow` [rows, k]. For int8 weights: `bytes` [rows, k], and for each row and group of
// 64 a scale and the start value of an integer sum. A row's numbers depend only on that row.
struct Activations {
  act* narrow;
  int8_t* bytes;
  float* scales;         // [rows, k / 64]
  int32_t* corrections;  // [rows, k / 64]: -WEIGHT_BIAS × the group's sum
  int32_t k;
  bool is_int8;
};

// Narrow 64 floats into group `g` of `row`.
inline void narrow_group(const Activations& x, int row, int g, const float* values) {
  if (!x.is_int8) {
    act* out = x.narrow + size_t(row) * x.k + g * GROUP;
    for (int i = 0; i < GROUP; i += W) store_act(out + i, load(values + i));
    return;
  }
  vf largest = abs(load(values));
  for (int i = W; i < GROUP; i += W) largest = max(largest, abs(load(values + i)));
  const float top = reduce_max(largest);
  const vf inverse = set1(top > 0.0f ? 127.0f / top : 0.0f);
  int8_t* out = x.bytes + size_t(row) * x.k + g * GROUP;
  vi sum = set1_int(0);
  for (int i = 0; i < GROUP; i += W) {
    const vi q = to_int(mul(load(values + i), inverse));
    sum = add_int(sum, q);
    store_int8(out + i, q);
  }
  const size_t at = size_t(row) * (x.k / GROUP) + g;
  x.scales[at] = top / 127.0f;
  x.corrections[at] = -WEIGHT_BIAS * reduce_add_int(sum);
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
