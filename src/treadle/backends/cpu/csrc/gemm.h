// Matrix products: activations [rows, k] × packed weights [n, k]ᵀ.
//
// A tile is up to ROWS rows by one panel, its sums kept in registers. Every output is one chain over k from
// first to last, whatever the number of rows: tiles cut only rows and columns, never k. What follows (a bias,
// an addition, an activation function) is applied to a tile by an epilogue, while the tile is in the L1 cache.
#pragma once
#include "activations.h"

namespace treadle {

// Rows and vectors of a tile, so that all sums, a panel's vectors and one activation fit the registers.
#if defined(__AVX512F__)
constexpr int ROWS_BF16 = 6, ROWS_INT8 = 6;
#else
constexpr int ROWS_BF16 = 4, ROWS_INT8 = 2;
#endif
constexpr int V = 2;                    // vectors of a row in a tile's inner loop
constexpr int PASSES = PANEL / (V * W);  // inner loops that cover a panel

// Where the next panel is, and how many of its bytes to prefetch per step, so that it is cached when its turn comes.
struct Ahead {
  const char* at;
  int step;
  inline void operator()() {
    prefetch(at);
    if (step > 64) prefetch(at + 64);
    at += step;
  }
};

// A tile's loop is a separate function: inlined, it gets worse register allocation (5 % slower in int8).
#define TREADLE_NOINLINE __attribute__((noinline))

// out: [R, 32].
template <int R>
TREADLE_NOINLINE void tile_bf16(const bf16* panel, const act* x, int k, float* out, Ahead ahead) {
  for (int pass = 0; pass < PASSES; ++pass) {
    const bf16* w = panel + pass * V * W * 2;
    vf sums[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sums[r][v] = zero();
    for (int i = 0; i < k; i += 2, w += PANEL * 2) {
      if (pass == 0) ahead();
      w2 ws[V];
      for (int v = 0; v < V; ++v) ws[v] = load_w2(w + v * W * 2);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] = dot2(sums[r][v], ws[v], x + size_t(r) * k + i);
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store(out + r * PANEL + (pass * V + v) * W, sums[r][v]);
  }
}

// Integer sums over a group of 64, exact; then one chain of floats over the groups.
template <int R>
TREADLE_NOINLINE void tile_int8(const int8_t* panel, const float* column_scales, const int8_t* x, const float* scales,
                      const int32_t* corrections, int k, float* out, Ahead ahead) {
  const int groups = k / GROUP;
  for (int pass = 0; pass < PASSES; ++pass) {
    const int8_t* w = panel + pass * V * W * 4;
    vf sums[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sums[r][v] = zero();
    for (int g = 0; g < groups; ++g) {
      vi part[R][V];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) part[r][v] = set1_int(corrections[r * groups + g]);
      const int8_t* xg = x + g * GROUP;
#pragma GCC unroll 4
      for (int i = 0; i < GROUP; i += 4, w += PANEL * 4) {
        if (pass == 0) ahead();
        w4 ws[V];
        for (int v = 0; v < V; ++v) ws[v] = load_w4(w + v * W * 4);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          for (int v = 0; v < V; ++v) part[r][v] = dot4(part[r][v], ws[v], xg + size_t(r) * k + i);
      }
      for (int r = 0; r < R; ++r) {
        const vf scale = set1(scales[r * groups + g]);
        for (int v = 0; v < V; ++v) sums[r][v] = fma(to_float(part[r][v]), scale, sums[r][v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) {
        const int c = (pass * V + v) * W;
        store(out + r * PANEL + c, mul(sums[r][v], load(column_scales + c)));
      }
  }
}

// One tile of `rows` ≤ ROWS rows from `row` on: out [rows, 32].
inline void tile(const Weights& w, const Activations& x, int panel, int row, int rows, float* out, Ahead ahead) {
  const char* data = static_cast<const char*>(w.data) + panel * panel_bytes(w.k, x.is_int8);
  if (x.is_int8) {
    const int8_t* bytes = x.bytes + size_t(row) * x.k;
    const float* scales = x.scales + size_t(row) * (x.k / GROUP);
    const int32_t* corrections = x.corrections + size_t(row) * (x.k / GROUP);
    with_count<ROWS_INT8>(rows, [&](auto count) {
      tile_int8<decltype(count)::value>(reinterpret_cast<const int8_t*>(data), w.scale + panel * PANEL, bytes, scales,
                                        corrections, x.k, out, ahead);
    });
  } else {
    const act* narrow = x.narrow + size_t(row) * x.k;
    with_count<ROWS_BF16>(rows, [&](auto count) {
      tile_bf16<decltype(count)::value>(reinterpret_cast<const bf16*>(data), narrow, x.k, out, ahead);
    });
  }
}

// The product for all rows. A thread's share is neighbouring panels, each for all rows, so that weights are read
// once; if there are too few panels, rows are divided as well.
//
// epilogue(row, rows, panel, tile): takes [rows, 32] sums, bias not yet added.
template <class Epilogue>
inline void gemm(Team& team, const Weights& w, const Activations& x, int rows, const Epilogue& epilogue) {
  if (rows == 0) return;
  const int panels = w.n / PANEL;
  const int most = x.is_int8 ? ROWS_INT8 : ROWS_BF16;
  const int tiles = (rows + most - 1) / most;
  int splits = 1;
  while (splits < tiles && panels * splits < 4 * team.threads()) ++splits;
  const size_t size = panel_bytes(w.k, x.is_int8);
  const int steps = x.k / (x.is_int8 ? 4 : 2);
  team.loop(panels * splits, [&](int item) {
    const int panel = item / splits, split = item % splits;
    const int first = tiles * split / splits, last = tiles * (split + 1) / splits;
    const int step = int((size / steps + (last - first) - 1) / (last - first));
    const char* next = static_cast<const char*>(w.data) + (panel + 1 < panels ? panel + 1 : panel) * size;
    alignas(64) float out[ROWS_BF16 * PANEL];
    for (int t = first; t < last; ++t) {
      // Tiles of equal size, so that none has too few rows to hide the latency of an addition.
      const int row = int(int64_t(rows) * t / tiles), end = int(int64_t(rows) * (t + 1) / tiles);
      tile(w, x, panel, row, end - row, out, Ahead{next + size_t(t - first) * steps * step, step});
      epilogue(row, end - row, panel, out);
    }
  });
}

// Epilogues.

// W sums of a tile's row from column c of the panel on, with their bias if there is one.
inline vf biased(const float* sums, const float* bias, int panel, int c) {
  const vf value = load(sums + c);
  return bias ? add(value, load(bias + panel * PANEL + c)) : value;
}

// out[row, column] = sum + bias, or += with ADD; out: [rows, stride].
template <bool ADD>
struct Write {
  float* out;
  int stride;
  const float* bias;
  void operator()(int row, int rows, int panel, const float* tile) const {
    for (int r = 0; r < rows; ++r) {
      float* to = out + size_t(row + r) * stride + panel * PANEL;
      for (int c = 0; c < PANEL; c += W) {
        const vf value = biased(tile + r * PANEL, bias, panel, c);
        store(to + c, ADD ? add(load(to + c), value) : value);
      }
    }
  }
};
using Store = Write<false>;
using Add = Write<true>;

constexpr int GATES = PANEL / 2;  // in a panel, followed by as many ups

// A panel holds 16 gates, then the 16 ups that belong to them: out[row, 16 × panel + j] = silu(gate) × up.
struct SiluMul {
  float* out;
  int stride;
  const float* bias;
  void operator()(int row, int rows, int panel, const float* tile) const {
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < GATES; c += W) {
        const vf gate = biased(tile + r * PANEL, bias, panel, c);
        const vf up = biased(tile + r * PANEL, bias, panel, GATES + c);
        const vf sigmoid = div(set1(1.0f), add(set1(1.0f), exp2(mul(gate, set1(-LOG2_E)))));
        store(out + size_t(row + r) * stride + panel * GATES + c, mul(mul(gate, sigmoid), up));
      }
  }
};

}  // namespace treadle
