// Matrices in GGUF's block formats: computed from what the file holds, without rounding a weight.
//
// A weight is d × q, d × q + m, d × s × q or d × s × q - e × m: q is an integer of 4 to 8 bits, the others belong to a
// group of 32 neighbouring inputs of an output (of 16 in Q6_K). In the K formats, d and e belong to 8 groups, and s
// and m are integers. (ggml, https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h)
//
// A panel holds, for each group in turn, the numbers of its 32 outputs side by side, first those that scale:
//   d [32], m [32] halves        in formats other than K; m only in Q4_1 and Q5_1
//   s [32], m [32] bytes         in the K formats; Q6_K has s [2][32] and no m
//   q of 4 bits: [4][32][4]      byte (j, c, i): inputs 4j + i (its low half) and 16 + 4j + i of output c
//   q of 5 to 8 bits: [8][32][4]
// In the K formats d [32] and e [32] (halves; no e in Q6_K) precede every 8 groups.
#pragma once
#include "pack.h"

namespace treadle {

constexpr int BLOCK_GROUP = 32;   // inputs that share a scale
constexpr int SUPER = 8;          // groups that share d and e in the K formats

// What distinguishes the formats. `bias` is stored as part of q: a weight is d × (q - bias).
struct BlockFormat {
  int bits;
  int bias;
  bool has_min;
  bool is_k;
  int parts;         // scales within a group
  int source_bytes;  // of a block in the file
};

constexpr BlockFormat block_format(Format format) {
  switch (format) {
    case Q4_0: return {4, 8, false, false, 1, 18};
    case Q4_1: return {4, 0, true, false, 1, 20};
    case Q4_K: return {4, 0, true, true, 1, 144};
    case Q5_0: return {5, 16, false, false, 1, 22};
    case Q5_1: return {5, 0, true, false, 1, 24};
    case Q5_K: return {5, 0, true, true, 1, 176};
    case Q6_K: return {6, 32, false, true, 2, 210};
    default: return {8, WEIGHT_BIAS, false, false, 1, 34};  // Q8_0
  }
}

constexpr int header_bytes(BlockFormat f) { return f.is_k ? PANEL * 2 * (f.has_min ? 2 : 1) : 0; }
constexpr int scale_bytes(BlockFormat f) { return f.is_k ? PANEL * 2 : PANEL * 2 * (f.has_min ? 2 : 1); }
constexpr int quant_bytes(BlockFormat f) { return PANEL * BLOCK_GROUP * (f.bits == 4 ? 4 : 8) / 8; }
constexpr int group_bytes(BlockFormat f) { return scale_bytes(f) + quant_bytes(f); }

// Where group `g` lies in a panel.
constexpr size_t group_start(BlockFormat f, int g) {
  return size_t(g) * group_bytes(f) + (f.is_k ? size_t(g / SUPER + 1) * header_bytes(f) : 0);
}

inline size_t panel_bytes(int32_t format, int k) {
  if (format == BF16) return size_t(PANEL) * k * 2;
  if (format == INT8) return size_t(PANEL) * k + PANEL * sizeof(float);
  const BlockFormat f = block_format(Format(format));
  const int groups = k / BLOCK_GROUP;
  return size_t(groups) * group_bytes(f) + (f.is_k ? size_t((groups + SUPER - 1) / SUPER) * header_bytes(f) : 0);
}

// One group of one output, as its block in the file has it.
struct BlockGroup {
  uint8_t q[BLOCK_GROUP];  // Q8_0: int8
  uint16_t d = 0, m = 0;   // halves; m is e in the K formats
  uint8_t s[2] = {0, 0}, s_min = 0;
};

inline uint16_t read_half(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, 2);
  return value;
}

// The 6-bit scale and minimum number `j` of 8 in the 12 bytes of Q4_K and Q5_K.
inline void read_k_scales(const uint8_t* p, int j, uint8_t& scale, uint8_t& minimum) {
  if (j < 4) {
    scale = p[j] & 63;
    minimum = p[j + 4] & 63;
  } else {
    scale = uint8_t((p[j + 4] & 15) | (p[j - 4] >> 6) << 4);
    minimum = uint8_t((p[j + 4] >> 4) | (p[j] >> 6) << 4);
  }
}

// Group `g` of a row of blocks.
inline BlockGroup read_group(Format format, const uint8_t* row, int g) {
  const BlockFormat f = block_format(format);
  BlockGroup out;
  const uint8_t* p = row + size_t(f.is_k ? g / SUPER : g) * f.source_bytes;
  const int j = g % SUPER;
  if (format == Q6_K) {
    const int half = j / 4, quarter = j % 4;  // 128 inputs, and 32 of them
    const uint8_t *low = p + half * 64 + (quarter % 2) * 32, *high = p + 128 + half * 32;
    for (int i = 0; i < BLOCK_GROUP; ++i)
      out.q[i] = uint8_t((quarter < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> (2 * quarter) & 3) << 4);
    out.s[0] = p[192 + 2 * j];
    out.s[1] = p[192 + 2 * j + 1];
    out.d = read_half(p + 208);
    return out;
  }
  out.d = read_half(p);
  p += 2;
  if (f.has_min) {
    out.m = read_half(p);
    p += 2;
  }
  if (f.is_k) {
    read_k_scales(p, j, out.s[0], out.s_min);
    p += 12;
    const uint8_t* high = p;  // Q5_K: bit j of byte i
    if (format == Q5_K) p += 32;
    for (int i = 0; i < BLOCK_GROUP; ++i) {
      out.q[i] = uint8_t(p[j / 2 * 32 + i] >> (j % 2 ? 4 : 0) & 15);
      if (format == Q5_K) out.q[i] = uint8_t(out.q[i] | (high[i] >> j & 1) << 4);
    }
  } else if (format == Q8_0) {
    std::memcpy(out.q, p, BLOCK_GROUP);
  } else {
    uint32_t high = 0;
    if (f.bits == 5) {
      std::memcpy(&high, p, 4);
      p += 4;
    }
    for (int i = 0; i < BLOCK_GROUP / 2; ++i) {
      out.q[i] = uint8_t((p[i] & 15) | (high >> i & 1) << 4);
      out.q[i + 16] = uint8_t(p[i] >> 4 | (high >> (i + 16) & 1) << 4);
    }
  }
  return out;
}

inline bool is_finite_half(uint16_t x) { return (x & 0x7c00) != 0x7c00; }

// source: [rows, blocks of a row] → the panel of outputs from row `first` on. Returns the number of groups whose
// scale or minimum is not finite.
inline int64_t pack_blocks(Format format, const uint8_t* source, int rows, int columns, int first, char* panel) {
  const BlockFormat f = block_format(format);
  const int groups = (columns + BLOCK_GROUP - 1) / BLOCK_GROUP;
  const size_t row_bytes = size_t(f.is_k ? groups / SUPER : groups) * f.source_bytes;
  int64_t bad = 0;
  for (int g = 0; g < int(round_up(columns, GROUP)) / BLOCK_GROUP; ++g) {
    char* out = panel + group_start(f, g);
    uint8_t* const q = reinterpret_cast<uint8_t*>(out + scale_bytes(f));
    if (g >= groups) {
      std::memset(out, 0, group_bytes(f));
      continue;
    }
    char* const head = f.is_k ? panel + group_start(f, g / SUPER * SUPER) - header_bytes(f) : out;
    uint16_t* const d = reinterpret_cast<uint16_t*>(head);
    for (int c = 0; c < PANEL; ++c) {
      BlockGroup x{};
      if (first + c < rows) x = read_group(format, source + size_t(first + c) * row_bytes, g);
      bad += !is_finite_half(x.d) || !is_finite_half(x.m);
      d[c] = x.d;
      if (f.has_min) d[PANEL + c] = x.m;
      if (f.is_k) {
        out[c] = char(x.s[0]);
        out[PANEL + c] = char(f.parts == 2 ? x.s[1] : x.s_min);
      }
      for (int i = 0; i < BLOCK_GROUP; i += 4)
        for (int b = 0; b < 4; ++b) {
          if (f.bits == 4) {
            if (i < 16) q[(i / 4 * PANEL + c) * 4 + b] = uint8_t(x.q[i + b] | x.q[i + 16 + b] << 4);
          } else {
            q[(i / 4 * PANEL + c) * 4 + b] = uint8_t(x.q[i + b] + (f.bits == 8 ? f.bias : 0));
          }
        }
    }
  }
  return bad;
}

inline float half_to_float(uint16_t x) {
  alignas(64) uint16_t halves[W] = {x};
  alignas(64) float values[W];
  store(values, load_half(halves));
  return values[0];
}

// Output `c` of a panel as floats, each with the roundings of gguf's `dequantize`.
inline void unpack_blocks(Format format, const char* panel, int c, int k, float* out) {
  const BlockFormat f = block_format(format);
  for (int g = 0; g < k / BLOCK_GROUP; ++g) {
    const char* at = panel + group_start(f, g);
    const char* head = f.is_k ? panel + group_start(f, g / SUPER * SUPER) - header_bytes(f) : at;
    const float d = half_to_float(reinterpret_cast<const uint16_t*>(head)[c]);
    float minimum = f.has_min ? half_to_float(reinterpret_cast<const uint16_t*>(head)[PANEL + c]) : 0.0f;
    float scale[2] = {d, d};
    if (f.is_k) {
      const uint8_t s = uint8_t(at[c]), t = uint8_t(at[PANEL + c]);
      scale[0] = f.parts == 2 ? d * float(int8_t(s)) : d * float(s);
      scale[1] = f.parts == 2 ? d * float(int8_t(t)) : scale[0];
      if (f.has_min) minimum = -(minimum * float(t));
    }
    const uint8_t* q = reinterpret_cast<const uint8_t*>(at + scale_bytes(f));
    for (int i = 0; i < BLOCK_GROUP; ++i) {
      int value;
      if (f.bits == 4) {
        const uint8_t byte = q[(i % 16 / 4 * PANEL + c) * 4 + i % 4];
        value = i < 16 ? byte & 15 : byte >> 4;
      } else {
        value = q[(i / 4 * PANEL + c) * 4 + i % 4];
      }
      value = f.bits == 8 ? int(int8_t(value - f.bias)) : value - f.bias;
      const float product = scale[i / 16] * float(value);
      out[g * BLOCK_GROUP + i] = f.has_min ? product + minimum : product;
    }
  }
}

// source: floats or blocks, [rows, columns] → data of the padded size. Returns how many groups are not finite.
inline int64_t pack(Format format, const void* source, int rows, int columns, char* data, int threads) {
  const int k = int(round_up(columns, GROUP)), panels = int(round_up(rows, PANEL) / PANEL);
  std::atomic<int64_t> bad{0};
  Pool::instance().run(threads, [&](Team team) {
    team.loop(panels, [&](int panel) {
      char* const out = data + panel * panel_bytes(format, k);
      const int first = panel * PANEL;
      if (format == BF16)
        pack_bf16(static_cast<const float*>(source), rows, columns, first, out);
      else if (format == INT8)
        pack_int8(static_cast<const float*>(source), rows, columns, first, out);
      else
        bad += pack_blocks(format, static_cast<const uint8_t*>(source), rows, columns, first, out);
    });
  });
  return bad;
}

// Row `index` of the matrix as floats [k]: an embedding that is also the output projection is stored only once.
inline void unpack_row(const Weights& w, int index, float* out) {
  const int c = index % PANEL;
  const char* panel = static_cast<const char*>(w.data) + index / PANEL * panel_bytes(w.format, w.k);
  if (w.format == BF16) {
    const bf16* in = reinterpret_cast<const bf16*>(panel) + c * 2;
    for (int i = 0; i < w.k; i += 2, in += PANEL * 2) {
      out[i] = bf16_to_float(in[0]);
      out[i + 1] = bf16_to_float(in[1]);
    }
  } else if (w.format == INT8) {
    const int8_t* in = reinterpret_cast<const int8_t*>(panel) + c * 4;
    const float scale = int8_scales(panel, w.k)[c];
    for (int i = 0; i < w.k; i += 4, in += PANEL * 4)
      for (int j = 0; j < 4; ++j) out[i + j] = float(int8_t(in[j] - WEIGHT_BIAS)) * scale;
  } else {
    unpack_blocks(Format(w.format), panel, c, w.k, out);
  }
}

}  // namespace treadle
