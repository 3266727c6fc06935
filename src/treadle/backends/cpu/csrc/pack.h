// Weights, in the order in which the dot products read them.
//
// [n, k] is cut into panels of 32 outputs. Within a panel the inputs are in order, so that a multiplication
// reads a panel from its first byte to its last:
//   bfloat16: [n/32][k/2][32][2]      int8: [n/32][k/4][32][4], a scale per output
// n is padded to a multiple of 32 and k to one of 64, with zeros.
#pragma once
#include "pool.h"

namespace treadle {

constexpr int PANEL = 32;  // outputs in a panel
constexpr int GROUP = 64;  // inputs that share a scale of the int8 activations; k is padded to it

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// A packed matrix. n and k are the padded sizes; scale is null for bfloat16, bias may be null.
struct Weights {
  const void* data;
  const float* scale;  // [n]
  const float* bias;   // [n]
  int32_t n, k;
};

inline size_t panel_bytes(int k, bool is_int8) { return size_t(PANEL) * k * (is_int8 ? 1 : 2); }

// Run f(panel) for the panels of a matrix of `rows` rows.
template <class F>
inline void for_panels(int rows, int threads, const F& f) {
  Pool::instance().run(threads, [&](Team team) { team.loop(int(round_up(rows, PANEL) / PANEL), f); });
}

// source: [rows, columns] floats → data of the padded size.
inline void pack_bf16(const float* source, int rows, int columns, bf16* data, int threads) {
  const int64_t k = round_up(columns, GROUP);
  for_panels(rows, threads, [&](int panel) {
    bf16* out = data + size_t(panel) * PANEL * k;
    std::memset(out, 0, size_t(PANEL) * k * sizeof(bf16));
    for (int c = 0; c < PANEL && panel * PANEL + c < rows; ++c) {
      const float* row = source + size_t(panel * PANEL + c) * columns;
      for (int i = 0; i < columns; ++i) out[((i / 2) * PANEL + c) * 2 + i % 2] = float_to_bf16(row[i]);
    }
  });
}

// Symmetric, one scale per row: w ≈ scale × round(w / scale), scale = max |w| / 127.
inline void pack_int8(const float* source, int rows, int columns, int8_t* data, float* scales, int threads) {
  const int64_t k = round_up(columns, GROUP);
  for_panels(rows, threads, [&](int panel) {
    int8_t* out = data + size_t(panel) * PANEL * k;
    std::memset(out, WEIGHT_BIAS, size_t(PANEL) * k);
    for (int c = 0; c < PANEL; ++c) {
      const int n = panel * PANEL + c;
      scales[n] = 0.0f;
      if (n >= rows) continue;
      const float* row = source + size_t(n) * columns;
      const float largest = largest_magnitude(row, columns);
      const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
      scales[n] = largest / 127.0f;
      for (int i = 0; i < columns; i += W) {
        int8_t narrow[W];
        store_int8(narrow, to_int(mul(load_first(row + i, columns - i, 0.0f), set1(inverse))));
        for (int j = 0; j < W && i + j < columns; ++j)
          out[((i + j) / 4 * PANEL + c) * 4 + (i + j) % 4] = int8_t(narrow[j] + WEIGHT_BIAS);
      }
    }
  });
}

// Row `index` of the matrix as floats: an embedding that is also the output projection is stored only once.
inline void unpack_row(const Weights& w, int index, float* out) {
  const int panel = index / PANEL, c = index % PANEL;
  if (w.scale == nullptr) {
    const bf16* in = static_cast<const bf16*>(w.data) + size_t(panel) * PANEL * w.k + c * 2;
    for (int i = 0; i < w.k; i += 2, in += PANEL * 2) {
      out[i] = bf16_to_float(in[0]);
      out[i + 1] = bf16_to_float(in[1]);
    }
  } else {
    const int8_t* in = static_cast<const int8_t*>(w.data) + size_t(panel) * PANEL * w.k + c * 4;
    const float scale = w.scale[index];
    for (int i = 0; i < w.k; i += 4, in += PANEL * 4)
      for (int j = 0; j < 4; ++j) out[i + j] = float(int8_t(in[j] - WEIGHT_BIAS)) * scale;
  }
}

}  // namespace treadle
