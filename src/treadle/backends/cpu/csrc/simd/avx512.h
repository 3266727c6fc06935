// AVX512 (F, BW, DQ, VL), without and with VNNI and BF16: 16 floats, 32 registers.
#pragma once
#include "x86.h"

namespace treadle {

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

inline vf zero_below(vf x, float least) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set1(least), _CMP_GE_OQ), x);
}

inline float reduce_add(vf x) {
  return reduce_add_256(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
}
inline float reduce_max(vf x) {
  return reduce_max_256(_mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
}

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

// Activations of bfloat16 products are bfloat16 where the processor multiplies them, else floats.
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
  vi pairs = load_int(p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))))};
}
inline vf dot2(vf acc, const w2& w, const act* x) { return fma(w.odd, set1(x[1]), fma(w.even, set1(x[0]), acc)); }
inline void store_act(act* p, vf x) { store(p, x); }
inline act to_act(float x) { return x; }
inline float from_act(act x) { return x; }
#endif

#if defined(__AVX512VNNI__)
// VNNI multiplies unsigned by signed numbers: int8 weights are stored with 128 added, and a sum starts at -128 times
// the sum of its activations.
constexpr int WEIGHT_BIAS = 128;
using w4 = vi;
inline w4 load_w4(const void* p) { return load_int(p); }
inline vi dot4(vi acc, w4 w, const int8_t* x) { return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(read_four(x))); }

template <int BITS>
struct UnsignedSum {
  vi wide;
  inline void add(int, vi w, const int8_t* x) { wide = dot4(wide, w, x); }
};
#else
// |w| × ±x keeps the 16-bit sums of two products from saturating.
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
  vi xs = _mm512_set1_epi32(read_four(x));
  xs = _mm512_mask_sub_epi8(xs, w.negative, _mm512_setzero_si512(), xs);
  return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(w.magnitude, xs), _mm512_set1_epi16(1)));
}

// Adds up products over quads number 0, 1, … of a group, whose number is a multiple of 8, in 16 bits for as long as
// they fit, and then widens them.
template <int BITS>
struct UnsignedSum {
  static constexpr int FIT = BITS <= 4 ? 8 : BITS == 5 ? 4 : 2;  // FIT × 2 × 127 × (2^BITS - 1) < 2^15
  static_assert(BITS <= 6);
  vi wide, narrow;
  inline void add(int quad, vi w, const int8_t* x) {
    const vi pairs = _mm512_maddubs_epi16(w, _mm512_set1_epi32(read_four(x)));
    narrow = quad % FIT == 0 ? pairs : _mm512_add_epi16(narrow, pairs);
    if (quad % FIT == FIT - 1) wide = add_int(wide, _mm512_madd_epi16(narrow, _mm512_set1_epi16(1)));
  }
};
#endif

// Rows of a tile of each kind of product; rows, cells and vectors of one in attention.
constexpr int ROWS_BF16 = 6, ROWS_INT8 = 6, ROWS_BLOCKS = 6;
constexpr int ATTENTION_ROWS = 6, ATTENTION_CELLS = 4, ATTENTION_V = 4;

}  // namespace treadle
