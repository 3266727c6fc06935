// One vector of floats, as wide as the build allows, and the dot products that all kernels are made of.
//
// simd/ has a file per family of instruction sets; no other file names an instruction. Each defines:
//   W, vf, vi and the operations on them; sums and maxima over lanes, always in the same order
//   dot2: W columns of weights, two bfloat16 of each along the reduction axis, times one pair of activations
//   dot4: W columns of int8 weights, four of each, times four int8 activations; exact
//   UnsignedSum: the same for weights without a sign that have fewer than 8 bits
//   the shapes of tiles that fit its registers
// Reductions and fused multiply-adds are written out (the compiler runs with -ffp-contract=off), so that the
// source fixes the order of every sum, not the compiler.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace treadle {

using bf16 = uint16_t;

inline float bf16_to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Rounds to the nearest, ties to even; a NaN stays a NaN.
inline bf16 float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline int32_t read_four(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return four;
}

}  // namespace treadle

// TREADLE_VNNI_256 is for tests: the kernels of AVX-VNNI on a processor that has AVX512's encoding of its instruction.
#if defined(__AVX512F__) && !defined(TREADLE_VNNI_256)
#include "simd/avx512.h"
#elif defined(__AVX2__)
#include "simd/avx2.h"
#elif defined(__aarch64__)
#include "simd/neon.h"
#else
#error "no kernels for this instruction set"
#endif

namespace treadle {

inline int32_t reduce_add_int(vi x) {
  alignas(64) int32_t values[W];
  store_int(values, x);
  int32_t total = 0;
  for (int i = 0; i < W; ++i) total += values[i];
  return total;
}

// A load that does not read past the end: the first n lanes, `other` in the rest.
inline vf load_first(const float* p, int n, float other) {
  if (n >= W) return load(p);
  alignas(64) float values[W];
  for (int i = 0; i < W; ++i) values[i] = i < n ? p[i] : other;
  return load(values);
}

inline float largest_magnitude(const float* x, int n) {
  vf top = zero();
  for (int i = 0; i < n; i += W) top = max(top, abs(load_first(x + i, n - i, 0.0f)));
  return reduce_max(top);
}

// 2^x with an error of about one unit in the last place; exactly 1 at 0; x is clamped to [-126, 127].
// Taylor series of degree 7 on [-1/2, 1/2], where its remainder is below 1e-8.
inline vf exp2(vf x) {
  x = min(max(x, set1(-126.0f)), set1(127.0f));
  vf n = round(x);
  vf f = sub(x, n);
  vf p = set1(1.52527338e-5f);
  p = fma(p, f, set1(1.54035304e-4f));
  p = fma(p, f, set1(1.33335581e-3f));
  p = fma(p, f, set1(9.61812911e-3f));
  p = fma(p, f, set1(5.55041087e-2f));
  p = fma(p, f, set1(2.40226507e-1f));
  p = fma(p, f, set1(6.93147181e-1f));
  p = fma(p, f, set1(1.0f));
  return mul(p, power_of_two(to_int(n)));
}
constexpr float LOG2_E = 1.44269504f;

// Calls run(std::integral_constant<int, count>()) for a count from 1 to MAX, so that loops over `count` are unrolled.
template <int MAX, class Run>
inline void with_count(int count, const Run& run) {
  if constexpr (MAX > 1) {
    if (count < MAX) return with_count<MAX - 1>(count, run);
  }
  run(std::integral_constant<int, MAX>());
}

}  // namespace treadle
