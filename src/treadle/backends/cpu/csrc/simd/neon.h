// NEON of 64-bit ARM, without and with the dot products of ARMv8.2: 4 floats, 32 registers.
#pragma once
#include <arm_neon.h>

namespace treadle {

constexpr int W = 4;
using vf = float32x4_t;
using vi = int32x4_t;

inline vf load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, vf x) { vst1q_f32(p, x); }
inline vf zero() { return vdupq_n_f32(0.0f); }
inline vf set1(float x) { return vdupq_n_f32(x); }
inline vf add(vf a, vf b) { return vaddq_f32(a, b); }
inline vf sub(vf a, vf b) { return vsubq_f32(a, b); }
inline vf mul(vf a, vf b) { return vmulq_f32(a, b); }
inline vf div(vf a, vf b) { return vdivq_f32(a, b); }
inline vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
// Of a number and a NaN, the number.
inline vf max(vf a, vf b) { return vmaxnmq_f32(a, b); }
inline vf min(vf a, vf b) { return vminnmq_f32(a, b); }
inline vf abs(vf a) { return vabsq_f32(a); }
inline vf round(vf a) { return vrndnq_f32(a); }
inline vi to_int(vf a) { return vcvtnq_s32_f32(a); }
inline vf to_float(vi a) { return vcvtq_f32_s32(a); }
inline vi load_int(const void* p) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
inline vi set1_int(int32_t x) { return vdupq_n_s32(x); }
inline vi add_int(vi a, vi b) { return vaddq_s32(a, b); }
inline vf power_of_two(vi n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)); }
inline vf keep_first(vf x, int n, float other) {
  if (n >= W) return x;
  const vi lane = {0, 1, 2, 3};
  return vbslq_f32(vcgtq_s32(vdupq_n_s32(n), lane), x, set1(other));
}
inline uint32_t mask_of(uint32x4_t lanes) {
  const uint32x4_t bits = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(lanes, bits));
}
inline uint32_t mask_ge(vf a, vf b) { return mask_of(vcgeq_f32(a, b)); }
inline uint32_t mask_gt(vf a, vf b) { return mask_of(vcgtq_f32(a, b)); }

inline vf zero_below(vf x, float least) {
  return vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(x, set1(least)), vreinterpretq_u32_f32(x)));
}

inline float reduce_add(vf x) { return vaddvq_f32(x); }  // (0 + 1) + (2 + 3)
inline float reduce_max(vf x) { return vmaxnmvq_f32(x); }

inline vi shift_left_7(vi x) { return vshlq_n_s32(x, 7); }
inline vi shift_right_7(vi x) { return vshrq_n_s32(x, 7); }
inline vi last_7(vi x) { return vandq_s32(x, vdupq_n_s32(127)); }
inline void store_int8(int8_t* p, vi x) {
  const int8x8_t bytes = vmovn_s16(vcombine_s16(vmovn_s32(x), vdup_n_s16(0)));
  const int32_t four = vget_lane_s32(vreinterpret_s32_s8(bytes), 0);
  std::memcpy(p, &four, 4);
}
inline void store_int(void* p, vi x) { vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_s32(x)); }
inline vi keep_even(vi pairs) { return vandq_s32(pairs, vdupq_n_s32(0xffff)); }

inline vf load_half(const void* p) {
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(static_cast<const uint8_t*>(p))));
}
inline vf load_unsigned(const uint8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}
inline vf load_signed(const int8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  return to_float(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
}
inline vi low_nibbles(vi bytes) {
  return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(bytes), vdupq_n_u8(15)));
}
inline vi high_nibbles(vi bytes) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(bytes), 4)); }

using act = float;  // of bfloat16 products
struct w2 {
  vf even, odd;
};
inline w2 load_w2(const bf16* p) {
  const vi pairs = load_int(p);
  return {vreinterpretq_f32_s32(vshlq_n_s32(pairs, 16)),
          vreinterpretq_f32_s32(vandq_s32(pairs, vdupq_n_s32(int(0xffff0000))))};
}
inline vf dot2(vf acc, const w2& w, const act* x) { return fma(w.odd, set1(x[1]), fma(w.even, set1(x[0]), acc)); }
inline void store_act(act* p, vf x) { store(p, x); }
inline act to_act(float x) { return x; }
inline float from_act(act x) { return x; }

constexpr int WEIGHT_BIAS = 0;
using w4 = int8x16_t;
inline w4 load_w4(const void* p) { return vreinterpretq_s8_s32(load_int(p)); }
inline vi dot4(vi acc, w4 w, const int8_t* x) {
  const int8x16_t xs = vreinterpretq_s8_s32(vdupq_n_s32(read_four(x)));
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(acc, w, xs);
#else
  // A sum of two products fits 16 bits: activations are at least -127.
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(xs)), high = vmull_high_s8(w, xs);
  return vpadalq_s16(acc, vpaddq_s16(low, high));
#endif
}

// Weights of fewer than 8 bits are the same with a sign.
template <int BITS>
struct UnsignedSum {
  static_assert(BITS < 8);
  vi wide;
  inline void add(int, vi w, const int8_t* x) { wide = dot4(wide, vreinterpretq_s8_s32(w), x); }
};

// A pause within a loop that waits for another thread.
inline void relax() { asm volatile("yield"); }

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Rows of a tile of each kind of product; rows, cells and vectors of one in attention: as many as have their sums in
// registers. Not measured.
constexpr int ROWS_BF16 = 6, ROWS_INT8 = 6, ROWS_BLOCKS = 4;
constexpr int ATTENTION_ROWS = 6, ATTENTION_CELLS = 1, ATTENTION_V = 4;

}  // namespace treadle
