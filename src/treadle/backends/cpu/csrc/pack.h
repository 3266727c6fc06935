// Weights, in the order in which the dot products read them.
//
// [n, k] is cut into panels of 32 outputs. Within a panel the inputs are in order, so that a multiplication
// reads a panel from its first byte to its last:
//   bfloat16: [k/2][32][2]
//   int8:     [k/4][32][4], then float [32], a scale per output
//   blocks:   see blocks.h
// n is padded to a multiple of 32 and k to one of 64, with zeros.
#pragma once
#include "pool.h"

namespace treadle {

constexpr int PANEL = 32;  // outputs in a panel
constexpr int GROUP = 64;  // k is padded to it; the int8 activations of an int8 matrix have a scale per group

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// How a matrix is stored. Those from Q4_0 on are GGUF's, with GGUF's values.
enum Format : int32_t { BF16, INT8, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0 };

// A packed matrix. n and k are the padded sizes; bias may be null.
struct Weights {
  const void* data;
  const float* bias;  // [n]
  int32_t n, k;
  int32_t format;
};

inline const float* int8_scales(const char* panel, int k) { return reinterpret_cast<const float*>(panel + PANEL * k); }

// source: [rows, columns] floats → the panel of outputs from row `first` on.
inline void pack_bf16(const float* source, int rows, int columns, int first, char* panel) {
  bf16* out = reinterpret_cast<bf16*>(panel);
  for (int c = 0; c < PANEL && first + c < rows; ++c) {
    const float* row = source + size_t(first + c) * columns;
    for (int i = 0; i < columns; ++i) out[((i / 2) * PANEL + c) * 2 + i % 2] = float_to_bf16(row[i]);
  }
}

// Symmetric, one scale per row: w ≈ scale × round(w / scale), scale = max |w| / 127.
inline void pack_int8(const float* source, int rows, int columns, int first, char* panel) {
  const int64_t k = round_up(columns, GROUP);
  int8_t* out = reinterpret_cast<int8_t*>(panel);
  float* scales = reinterpret_cast<float*>(panel + PANEL * k);
  std::memset(out, WEIGHT_BIAS, PANEL * k);
  for (int c = 0; c < PANEL && first + c < rows; ++c) {
    const float* row = source + size_t(first + c) * columns;
    const float largest = largest_magnitude(row, columns);
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    scales[c] = largest / 127.0f;
    for (int i = 0; i < columns; i += W) {
      int8_t narrow[W];
      store_int8(narrow, to_int(mul(load_first(row + i, columns - i, 0.0f), set1(inverse))));
      for (int j = 0; j < W && i + j < columns; ++j)
        out[((i + j) / 4 * PANEL + c) * 4 + (i + j) % 4] = int8_t(narrow[j] + WEIGHT_BIAS);
    }
  }
}

}  // namespace treadle
