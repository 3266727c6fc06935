// One vector of floats, as wide as the build allows, and the two dot products that all kernels are made of.
//
// Builds differ only in this file: AVX512 with BF16 and VNNI, with VNNI, without either, and AVX2.
// Reductions and fused multiply-adds are written out (the compiler runs with -ffp-contract=off), so that the
// source fixes the order of every sum, not the compiler.
#pragma once
#include <immintrin.h>

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

#if defined(__AVX512F__)

constexpr int W = 16;  // floats in a vector
using vf = __m512;
using vi = __m512i;

inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline vf zero() { return _mm512_setzero_ps(); }
inline vf set1(float x) { return _mm512_set1_ps(x); }
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf abs(vf a) { return _mm512_abs_ps(a); }
inline vf round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vi to_int(vf a) { return _mm512_cvtps_epi32(a); }
inline vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
inline vi load_int(const void* p) { return _mm512_loadu_si512(p); }
inline vi set1_int(int32_t x) { return _mm512_set1_epi32(x); }
inline vi add_int(vi a, vi b) { return _mm512_add_epi32(a, b); }
inline vf power_of_two(vi n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
// The first n lanes of x, `other` in the rest.
inline vf keep_first(vf x, int n, float other) {
  if (n >= W) return x;
  __mmask16 mask = n <= 0 ? 0 : __mmask16((1u << n) - 1);
  return _mm512_mask_blend_ps(mask, set1(other), x);
}
// Bit i: whether lane i of a is at least (greater than) that of b.
inline uint32_t mask_ge(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline uint32_t mask_gt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }

inline __m256 low_half(vf x) { return _mm512_castps512_ps256(x); }
inline __m256 high_half(vf x) { return _mm512_extractf32x8_ps(x, 1); }

inline vi shift_left_7(vi x) { return _mm512_slli_epi32(x, 7); }
inline vi shift_right_7(vi x) { return _mm512_srli_epi32(x, 7); }
inline vi last_7(vi x) { return _mm512_and_si512(x, _mm512_set1_epi32(127)); }
inline void store_int8(int8_t* p, vi x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
inline void store_int(void* p, vi x) { _mm512_storeu_si512(p, x); }
inline vi keep_even(vi pairs) { return _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff)); }

// W numbers of 16 or 8 bits as floats.
inline vf load_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline vf load_unsigned(const uint8_t* p) {
  return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline vf load_signed(const int8_t* p) {
  return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline vi low_nibbles(vi bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
inline vi high_nibbles(vi bytes) { return low_nibbles(_mm512_srli_epi16(bytes, 4)); }

#else

constexpr int W = 8;
using vf = __m256;
using vi = __m256i;

inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
inline vf zero() { return _mm256_setzero_ps(); }
inline vf set1(float x) { return _mm256_set1_ps(x); }
inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf abs(vf a) { return _mm256_andnot_ps(set1(-0.0f), a); }
inline vf round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vi to_int(vf a) { return _mm256_cvtps_epi32(a); }
inline vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
inline vi load_int(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline vi set1_int(int32_t x) { return _mm256_set1_epi32(x); }
inline vi add_int(vi a, vi b) { return _mm256_add_epi32(a, b); }
inline vf power_of_two(vi n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline vf keep_first(vf x, int n, float other) {
  if (n >= W) return x;
  vi lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  vi mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
  return _mm256_blendv_ps(set1(other), x, _mm256_castsi256_ps(mask));
}
inline uint32_t mask_ge(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
inline uint32_t mask_gt(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }

inline vi shift_left_7(vi x) { return _mm256_slli_epi32(x, 7); }
inline vi shift_right_7(vi x) { return _mm256_srli_epi32(x, 7); }
inline vi last_7(vi x) { return _mm256_and_si256(x, _mm256_set1_epi32(127)); }
inline void store_int8(int8_t* p, vi x) {
  alignas(32) int32_t values[W];
  _mm256_store_si256(reinterpret_cast<__m256i*>(values), x);
  for (int i = 0; i < W; ++i) p[i] = int8_t(values[i]);
}
inline void store_int(void* p, vi x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline vi keep_even(vi pairs) { return _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)); }

inline vf load_half(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
inline vf load_unsigned(const uint8_t* p) {
  return to_float(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline vf load_signed(const int8_t* p) {
  return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline vi low_nibbles(vi bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
inline vi high_nibbles(vi bytes) { return low_nibbles(_mm256_srli_epi16(bytes, 4)); }

#endif

// Sum and maximum over a vector's lanes, always in the same order.
inline float reduce_add(vf x) {
#if defined(__AVX512F__)
  __m256 half = _mm256_add_ps(low_half(x), high_half(x));
#else
  __m256 half = x;
#endif
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float reduce_max(vf x) {
#if defined(__AVX512F__)
  __m256 half = _mm256_max_ps(low_half(x), high_half(x));
#else
  __m256 half = x;
#endif
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

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

// dot2: W columns of weights, two bfloat16 of each along the reduction axis, times one pair of activations.
// Activations are bfloat16 in builds that have the instruction, floats in the others.
#if defined(__AVX512BF16__)
using act = bf16;
using w2 = __m512bh;
inline w2 load_w2(const bf16* p) { return (w2)load_int(p); }
inline vf dot2(vf acc, w2 w, const act* x) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  return _mm512_dpbf16_ps(acc, w, (w2)_mm512_set1_epi32(pair));
}
inline void store_act(act* p, vf x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }
inline act to_act(float x) { return float_to_bf16(x); }
inline float from_act(act x) { return bf16_to_float(x); }
#else
using act = float;
struct w2 {
  vf even, odd;
};
inline w2 load_w2(const bf16* p) {
#if defined(__AVX512F__)
  vi pairs = load_int(p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))))};
#else
  vi pairs = load_int(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))))};
#endif
}
inline vf dot2(vf acc, const w2& w, const act* x) { return fma(w.odd, set1(x[1]), fma(w.even, set1(x[0]), acc)); }
inline void store_act(act* p, vf x) { store(p, x); }
inline act to_act(float x) { return x; }
inline float from_act(act x) { return x; }
#endif

// dot4: W columns of int8 weights, four of each along the reduction axis, times four int8 activations; exact.
// VNNI multiplies unsigned by signed numbers: its builds store weights with 128 added, and start a sum at -128
// times the sum of its activations. In the others |w| × ±x keeps the 16-bit sums of two products from saturating.
#if defined(__AVX512VNNI__)
constexpr int WEIGHT_BIAS = 128;
using w4 = vi;
inline w4 load_w4(const void* p) { return load_int(p); }
inline vi dot4(vi acc, w4 w, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four));
}
#elif defined(__AVX512F__)
constexpr int WEIGHT_BIAS = 0;
struct w4 {
  vi magnitude;
  __mmask64 negative;
};
inline w4 load_w4(const void* p) {
  vi w = load_int(p);
  return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
}
inline vi dot4(vi acc, const w4& w, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  vi xs = _mm512_set1_epi32(four);
  xs = _mm512_mask_sub_epi8(xs, w.negative, _mm512_setzero_si512(), xs);
  return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(w.magnitude, xs), _mm512_set1_epi16(1)));
}
#else
constexpr int WEIGHT_BIAS = 0;
struct w4 {
  vi magnitude, sign;
};
inline w4 load_w4(const void* p) {
  vi w = load_int(p);
  return {_mm256_abs_epi8(w), w};
}
inline vi dot4(vi acc, const w4& w, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  vi xs = _mm256_sign_epi8(_mm256_set1_epi32(four), w.sign);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w.magnitude, xs), _mm256_set1_epi16(1)));
}
#endif

// The same for weights without a sign that have at most BITS < 8 bits, added up over quads number 0, 1, … of a group
// whose number of quads is a multiple of 8. VNNI needs no room for the sums; the others add up products in 16 bits for
// as long as they fit, and then widen them.
template <int BITS>
struct UnsignedSum {
  vi wide;
#if defined(__AVX512VNNI__)
  inline void add(int, vi w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    wide = _mm512_dpbusd_epi32(wide, w, _mm512_set1_epi32(four));
  }
#else
  static constexpr int FIT = BITS <= 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;  // FIT × 2 × 127 × (2^BITS - 1) < 2^15
  vi narrow;
  inline void add(int quad, vi w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
#if defined(__AVX512F__)
    const vi pairs = _mm512_maddubs_epi16(w, _mm512_set1_epi32(four));
    narrow = quad % FIT == 0 ? pairs : _mm512_add_epi16(narrow, pairs);
    if (quad % FIT == FIT - 1) wide = add_int(wide, _mm512_madd_epi16(narrow, _mm512_set1_epi16(1)));
#else
    const vi pairs = _mm256_maddubs_epi16(w, _mm256_set1_epi32(four));
    narrow = quad % FIT == 0 ? pairs : _mm256_add_epi16(narrow, pairs);
    if (quad % FIT == FIT - 1) wide = add_int(wide, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
#endif
  }
#endif
};

// Calls run(std::integral_constant<int, count>()) for a count from 1 to MAX, so that loops over `count` are unrolled.
template <int MAX, class Run>
inline void with_count(int count, const Run& run) {
  if constexpr (MAX > 1) {
    if (count < MAX) return with_count<MAX - 1>(count, run);
  }
  run(std::integral_constant<int, MAX>());
}

// A pause within a loop that waits for another thread.
inline void relax() { _mm_pause(); }

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace treadle
