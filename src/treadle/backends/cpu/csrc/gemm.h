// Matrix products: activations [rows, k] × packed weights [n, k]ᵀ.
//
// A tile is up to ROWS rows by one panel, its sums kept in registers. Every output is one chain over k from
// first to last, whatever the number of rows: tiles cut only rows and columns, never k. What follows (a bias,
// an addition, an activation function) is applied to a tile by an epilogue, while the tile is in the L1 cache.
#pragma once
#include "activations.h"

namespace treadle {

constexpr int MAX_TILE_ROWS = std::max({ROWS_BF16, ROWS_INT8, ROWS_BLOCKS});
constexpr int V = 2;                    // vectors of a row in a tile's inner loop
constexpr int PASSES = PANEL / (V * W);  // inner loops that cover a panel

inline int tile_rows(int32_t format) {
  return format == BF16 ? ROWS_BF16 : format == INT8 ? ROWS_INT8 : ROWS_BLOCKS;
}

// What is read next, and how many of its bytes to prefetch per step of a tile, so that it is cached when its turn comes.
struct Ahead {
  const char* at;
  int step;
  inline void operator()() {
    for (int line = 0; line < step; line += 64) prefetch(at + line);
    at += step;
  }
};

// How often a tile calls its `Ahead`.
inline int tile_steps(int32_t format, int k) {
  if (format == BF16) return k / 2;
  return format == INT8 || block_format(Format(format)).bits > 4 ? k / 4 : k / 8;
}

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
TREADLE_NOINLINE void tile_int8(const char* panel, const int8_t* x, const float* scales, const int32_t* sums, int k,
                                float* out, Ahead ahead) {
  const int groups = k / GROUP;
  for (int pass = 0; pass < PASSES; ++pass) {
    const char* w = panel + pass * V * W * 4;
    vf totals[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) totals[r][v] = zero();
    for (int g = 0; g < groups; ++g) {
      vi part[R][V];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) part[r][v] = set1_int(-WEIGHT_BIAS * sums[r * groups + g]);
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
        for (int v = 0; v < V; ++v) totals[r][v] = fma(to_float(part[r][v]), scale, totals[r][v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) {
        const int c = (pass * V + v) * W;
        store(out + r * PANEL + c, mul(totals[r][v], load(int8_scales(panel, k) + c)));
      }
  }
}

// The same for blocks: integer sums over the inputs that share a weight's scale, exact; then, group after group,
// total += sum × (scale of the weights × scale of the activations), and total += minimum × offset.
template <int R, Format FORMAT>
TREADLE_NOINLINE void tile_blocks(const char* panel, const Activations& x, int row, float* out, Ahead ahead) {
  constexpr BlockFormat F = block_format(FORMAT);
  constexpr int QUADS = BLOCK_GROUP / 4 / F.parts;
  const int k = x.k, groups = k / BLOCK_GROUP;
  const int8_t* bytes = x.bytes + size_t(row) * k;
  const float *scales = x.scales + size_t(row) * groups, *offsets = x.offsets + size_t(row) * groups;
  const int32_t* sums = x.sums + size_t(row) * groups * 2;
  for (int pass = 0; pass < PASSES; ++pass) {
    const char* at = panel;
    vf totals[R][V], d[V], e[V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) totals[r][v] = zero();
    for (int g = 0; g < groups; ++g) {
      if constexpr (F.is_k) {
        if (g % SUPER == 0) {
          for (int v = 0; v < V; ++v) {
            const int c = (pass * V + v) * W;
            d[v] = load_half(at + c * 2);
            if constexpr (F.has_min) e[v] = sub(zero(), load_half(at + (PANEL + c) * 2));
          }
          at += header_bytes(F);
        }
      }
      const int8_t* xg = bytes + g * BLOCK_GROUP;
      const char* q = at + scale_bytes(F) + pass * V * W * 4;
#pragma GCC unroll 2
      for (int part = 0; part < F.parts; ++part) {
        vf scale[V], minimum[V];
        for (int v = 0; v < V; ++v) {
          const int c = (pass * V + v) * W;
          if constexpr (FORMAT == Q6_K) {
            scale[v] = mul(d[v], load_signed(reinterpret_cast<const int8_t*>(at) + part * PANEL + c));
          } else if constexpr (F.is_k) {
            scale[v] = mul(d[v], load_unsigned(reinterpret_cast<const uint8_t*>(at) + c));
            minimum[v] = mul(e[v], load_unsigned(reinterpret_cast<const uint8_t*>(at) + PANEL + c));
          } else {
            scale[v] = load_half(at + c * 2);
            if constexpr (F.has_min) minimum[v] = load_half(at + (PANEL + c) * 2);
          }
        }
        vi start[R];
        for (int r = 0; r < R; ++r) {
          const int32_t* s = sums + size_t(r) * groups * 2 + g * 2;
          start[r] = set1_int(F.bias == 0 ? 0 : -F.bias * (F.parts == 2 ? s[part] : s[0] + s[1]));
        }
        vi wide[R][V];
        if constexpr (F.bits == 8) {
          for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) wide[r][v] = start[r];
#pragma GCC unroll 8
          for (int i = 0; i < QUADS; ++i) {
            if (pass == 0) ahead();
            w4 ws[V];
            for (int v = 0; v < V; ++v) ws[v] = load_w4(q + (i * PANEL + v * W) * 4);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
              for (int v = 0; v < V; ++v) wide[r][v] = dot4(wide[r][v], ws[v], xg + size_t(r) * k + i * 4);
          }
        } else {
          UnsignedSum<F.bits> sum[R][V];
          for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) sum[r][v].wide = start[r];
          if constexpr (F.bits == 4) {
#pragma GCC unroll 4
            for (int i = 0; i < QUADS / 2; ++i) {
              if (pass == 0) ahead();
              vi pairs[V];
              for (int v = 0; v < V; ++v) pairs[v] = load_int(q + (i * PANEL + v * W) * 4);
              for (int v = 0; v < V; ++v) {
                const vi low = low_nibbles(pairs[v]), high = high_nibbles(pairs[v]);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                  sum[r][v].add(2 * i, low, xg + size_t(r) * k + i * 4);
                  sum[r][v].add(2 * i + 1, high, xg + size_t(r) * k + 16 + i * 4);
                }
              }
            }
          } else {
#pragma GCC unroll 8
            for (int i = 0; i < QUADS; ++i) {
              if (pass == 0) ahead();
              for (int v = 0; v < V; ++v) {
                const vi w = load_int(q + ((part * QUADS + i) * PANEL + v * W) * 4);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) sum[r][v].add(i, w, xg + size_t(r) * k + part * 16 + i * 4);
              }
            }
          }
          for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) wide[r][v] = sum[r][v].wide;
        }
        for (int r = 0; r < R; ++r) {
          const vf own = set1(scales[r * groups + g]);
          for (int v = 0; v < V; ++v) {
            totals[r][v] = fma(to_float(wide[r][v]), mul(scale[v], own), totals[r][v]);
            if constexpr (F.has_min) totals[r][v] = fma(minimum[v], set1(offsets[r * groups + g]), totals[r][v]);
          }
        }
      }
      at += group_bytes(F);
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store(out + r * PANEL + (pass * V + v) * W, totals[r][v]);
  }
}

template <Format FORMAT>
inline void tile_blocks(const char* panel, const Activations& x, int row, int rows, float* out, Ahead ahead) {
  with_count<ROWS_BLOCKS>(rows, [&](auto count) {
    tile_blocks<decltype(count)::value, FORMAT>(panel, x, row, out, ahead);
  });
}

// One tile of `rows` ≤ tile_rows rows from `row` on: out [rows, 32].
inline void tile(const Weights& w, const Activations& x, int panel, int row, int rows, float* out, Ahead ahead) {
  const char* data = static_cast<const char*>(w.data) + panel * panel_bytes(w.format, w.k);
  switch (w.format) {
    case BF16:
      return with_count<ROWS_BF16>(rows, [&](auto count) {
        tile_bf16<decltype(count)::value>(reinterpret_cast<const bf16*>(data), x.narrow + size_t(row) * x.k, x.k, out,
                                          ahead);
      });
    case INT8:
      return with_count<ROWS_INT8>(rows, [&](auto count) {
        const size_t at = size_t(row) * (x.k / GROUP);
        tile_int8<decltype(count)::value>(data, x.bytes + size_t(row) * x.k, x.scales + at, x.sums + at, x.k, out,
                                          ahead);
      });
    case Q4_0: return tile_blocks<Q4_0>(data, x, row, rows, out, ahead);
    case Q4_1: return tile_blocks<Q4_1>(data, x, row, rows, out, ahead);
    case Q4_K: return tile_blocks<Q4_K>(data, x, row, rows, out, ahead);
    case Q5_0: return tile_blocks<Q5_0>(data, x, row, rows, out, ahead);
    case Q5_1: return tile_blocks<Q5_1>(data, x, row, rows, out, ahead);
    case Q5_K: return tile_blocks<Q5_K>(data, x, row, rows, out, ahead);
    case Q6_K: return tile_blocks<Q6_K>(data, x, row, rows, out, ahead);
    case Q8_0: return tile_blocks<Q8_0>(data, x, row, rows, out, ahead);
  }
}

// How the rows of a product are cut into tiles of equal size, so that none has too few rows to hide the latency of an
// addition, and the tiles into parts for threads.
struct Tiles {
  int rows, tiles, splits;

  Tiles(int rows, int most, int panels, int threads) : rows(rows), tiles((rows + most - 1) / most), splits(1) {
    while (splits < tiles && panels * splits < 4 * threads) ++splits;
  }
  int start(int tile) const { return int(int64_t(rows) * tile / tiles); }
  int first_of(int split) const { return tiles * split / splits; }
};

// A panel that is about to be read, and the number of bytes of it to prefetch in each step of `tiles` tiles: none for a
// single row, which reads as fast as the memory allows (16 % slower with prefetches).
inline Ahead ahead_of(const Weights& w, int panel, const Weights& current, int rows, int tiles, int tile) {
  if (rows == 1) return {nullptr, 0};
  const size_t size = panel_bytes(w.format, w.k);
  const int steps = tile_steps(current.format, current.k);
  const int step = int((size / steps + tiles - 1) / tiles);
  return {static_cast<const char*>(w.data) + panel * size + size_t(tile) * steps * step, step};
}

// One of several matrices that are multiplied with the same activations.
template <class Epilogue>
struct Product {
  const Weights& weights;
  Epilogue epilogue;  // (row, rows, panel, tile): takes [rows, 32] sums, bias not yet added
};

// The products for all rows. A thread's share is neighbouring panels, each for all rows, so that weights are read
// once; if there are too few panels, rows are divided as well.
template <class Epilogue, size_t N>
inline void gemm(Team& team, const Activations& x, int rows, const Product<Epilogue> (&products)[N]) {
  if (rows == 0) return;
  int panels = 0, most = MAX_TILE_ROWS;
  for (const auto& p : products) {
    panels += p.weights.n / PANEL;
    most = std::min(most, tile_rows(p.weights.format));
  }
  const Tiles tiles(rows, most, panels, team.threads());
  team.loop(panels * tiles.splits, [&](int item) {
    int panel = item / tiles.splits;
    size_t i = 0;
    for (; panel >= products[i].weights.n / PANEL; ++i) panel -= products[i].weights.n / PANEL;
    const Weights& w = products[i].weights;
    const bool is_last = panel + 1 == w.n / PANEL;
    const Weights& next = is_last && i + 1 < N ? products[i + 1].weights : w;
    const int next_panel = !is_last ? panel + 1 : i + 1 < N ? 0 : panel;
    const int split = item % tiles.splits, first = tiles.first_of(split), last = tiles.first_of(split + 1);
    alignas(64) float out[MAX_TILE_ROWS * PANEL];
    for (int t = first; t < last; ++t) {
      const int row = tiles.start(t), count = tiles.start(t + 1) - row;
      tile(w, x, panel, row, count, out, ahead_of(next, next_panel, w, rows, last - first, t - first));
      products[i].epilogue(row, count, panel, out);
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

constexpr int GATED_TILES = 16;  // tiles of gates that are kept until the ups are there

// out[row, column] = silu(gate) × up, of two products with the same activations; out: [rows, stride].
inline void gemm_silu_mul(Team& team, const Activations& x, int rows, const Weights& gate, const Weights& up,
                          float* out, int stride) {
  if (rows == 0) return;
  const int panels = gate.n / PANEL;
  const Tiles tiles(rows, std::min(tile_rows(gate.format), tile_rows(up.format)), panels, team.threads());
  team.loop(panels * tiles.splits, [&](int item) {
    const int panel = item / tiles.splits, next = std::min(panel + 1, panels - 1);
    const int split = item % tiles.splits, last = tiles.first_of(split + 1);
    alignas(64) float gates[GATED_TILES * MAX_TILE_ROWS * PANEL], ups[MAX_TILE_ROWS * PANEL];
    for (int first = tiles.first_of(split); first < last; first += GATED_TILES) {
      const int end = std::min(first + GATED_TILES, last);
      for (int t = first; t < end; ++t) {
        const int row = tiles.start(t), count = tiles.start(t + 1) - row;
        tile(gate, x, panel, row, count, gates + (row - tiles.start(first)) * PANEL,
             ahead_of(up, panel, gate, rows, end - first, t - first));
      }
      for (int t = first; t < end; ++t) {
        const int row = tiles.start(t), count = tiles.start(t + 1) - row;
        tile(up, x, panel, row, count, ups, ahead_of(gate, next, up, rows, end - first, t - first));
        for (int r = 0; r < count; ++r)
          for (int c = 0; c < PANEL; c += W) {
            const vf g = biased(gates + (row - tiles.start(first) + r) * PANEL, gate.bias, panel, c);
            const vf u = biased(ups + r * PANEL, up.bias, panel, c);
            const vf sigmoid = div(set1(1.0f), add(set1(1.0f), exp2(mul(g, set1(-LOG2_E)))));
            store(out + size_t(row + r) * stride + panel * PANEL + c, mul(mul(g, sigmoid), u));
          }
      }
    }
  });
}

}  // namespace treadle
