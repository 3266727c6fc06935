// Root-mean-square normalization (Zhang and Sennrich 2019).
#pragma once
#include "activations.h"

namespace treadle {

// 1 / sqrt(mean(x²) + eps) over `size` floats in a buffer that is padded with zeros to whole groups of 64.
inline float inverse_rms(const float* x, int size, float eps) {
  vf sums[GROUP / W];
  for (auto& s : sums) s = zero();
  for (int i = 0; i < round_up(size, GROUP); i += GROUP)
    for (int j = 0; j < GROUP / W; ++j) {
      const vf value = load(x + i + j * W);
      sums[j] = fma(value, value, sums[j]);
    }
  vf total = sums[0];
  for (int j = 1; j < GROUP / W; ++j) total = add(total, sums[j]);
  return 1.0f / std::sqrt(reduce_add(total) / float(size) + eps);
}

// Normalize x [k] (padded) and narrow it into row `to` of the activations.
inline void norm_row(const Activations& out, int to, const float* x, int size, const float* weight, float eps) {
  const float scale = inverse_rms(x, size, eps);
  alignas(64) float values[GROUP];
  for (int g = 0; g < out.k / GROUP; ++g) {
    for (int i = 0; i < GROUP; ++i) values[i] = x[g * GROUP + i] * scale * weight[g * GROUP + i];
    narrow_group(out, to, g, values);
  }
}

}  // namespace treadle
