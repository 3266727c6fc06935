// AVX2 with FMA and F16C, without and with AVX-VNNI: 8 floats, 16 registers.
#pragma once
#include "x86.h"

namespace treadle {

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

inline vf zero_below(vf x, float least) { return _mm256_and_ps(_mm256_cmp_ps(x, set1(least), _CMP_GE_OQ), x); }

inline float reduce_add(vf x) { return reduce_add_256(x); }
inline float reduce_max(vf x) { return reduce_max_256(x); }

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

using act = float;  // of bfloat16 products
struct w2 {
  vf even, odd;
};
inline w2 load_w2(const bf16* p) {
  vi pairs = load_int(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))))};
}
inline vf dot2(vf acc, const w2& w, const act* x) { return fma(w.odd, set1(x[1]), fma(w.even, set1(x[0]), acc)); }
inline void store_act(act* p, vf x) { store(p, x); }
inline act to_act(float x) { return x; }
inline float from_act(act x) { return x; }

#if defined(__AVXVNNI__) || defined(TREADLE_VNNI_256)
// As with AVX512 VNNI.
constexpr int WEIGHT_BIAS = 128;
using w4 = vi;
inline w4 load_w4(const void* p) { return load_int(p); }
inline vi dot4(vi acc, w4 w, const int8_t* x) {
#if defined(TREADLE_VNNI_256)
  return _mm256_dpbusd_epi32(acc, w, _mm256_set1_epi32(read_four(x)));
#else
  return _mm256_dpbusd_avx_epi32(acc, w, _mm256_set1_epi32(read_four(x)));
#endif
}

template <int BITS>
struct UnsignedSum {
  vi wide;
  inline void add(int, vi w, const int8_t* x) { wide = dot4(wide, w, x); }
};
constexpr int ROWS_INT8 = 4, ROWS_BLOCKS = 5;
#else
// |w| × ±x keeps the 16-bit sums of two products from saturating.
constexpr int WEIGHT_BIAS = 0;
struct w4 {
  vi magnitude, sign;
};
inline w4 load_w4(const void* p) {
  vi w = load_int(p);
  return {_mm256_abs_epi8(w), w};
}
inline vi dot4(vi acc, const w4& w, const int8_t* x) {
  vi xs = _mm256_sign_epi8(_mm256_set1_epi32(read_four(x)), w.sign);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w.magnitude, xs), _mm256_set1_epi16(1)));
}

// As with AVX512 without VNNI.
template <int BITS>
struct UnsignedSum {
  static constexpr int FIT = BITS <= 4 ? 8 : BITS == 5 ? 4 : 2;  // FIT × 2 × 127 × (2^BITS - 1) < 2^15
  static_assert(BITS <= 6);
  vi wide, narrow;
  inline void add(int quad, vi w, const int8_t* x) {
    const vi pairs = _mm256_maddubs_epi16(w, _mm256_set1_epi32(read_four(x)));
    narrow = quad % FIT == 0 ? pairs : _mm256_add_epi16(narrow, pairs);
    if (quad % FIT == FIT - 1) wide = add_int(wide, _mm256_madd_epi16(narrow, _mm256_set1_epi16(1)));
  }
};
constexpr int ROWS_INT8 = 4, ROWS_BLOCKS = 4;
#endif

// Rows of a tile of each kind of product; rows, cells and vectors of one in attention.
constexpr int ROWS_BF16 = 4;
constexpr int ATTENTION_ROWS = 4, ATTENTION_CELLS = 1, ATTENTION_V = 2;

}  // namespace treadle
