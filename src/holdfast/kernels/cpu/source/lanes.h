/* Vectors of as many lanes as the processor has: 16 or eight on x86, four on ARM. LANES is not defined elsewhere.
 *
 * A Whole has LANES 32-bit sums, or the codes of four inputs of LANES outputs; a Real has LANES floats. */

#ifndef HOLDFAST_LANES_H
#define HOLDFAST_LANES_H

#include "forms.h"

#include <string.h>

#if defined(HOLDFAST_PORTABLE)
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define LANES 8
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define LANES 4
#endif

#if LANES == 16
typedef __m512i Whole;
typedef __m512 Real;
#define LOAD(at) _mm512_loadu_si512(at)
#define LOW_HALVES(v) _mm512_and_si512(v, _mm512_set1_epi8(15))
#define HIGH_HALVES(v) _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15))
#define REPEAT(at) _mm512_set1_epi32(*(const int32_t *)(at))
#define ZERO() _mm512_setzero_si512()
#define TO_REAL(v) _mm512_cvtepi32_ps(v)
#define MULTIPLY(a, b) _mm512_mul_ps(a, b)
#define MULTIPLY_ADD(a, b, c) _mm512_fmadd_ps(a, b, c)
#define REPEAT_REAL(value) _mm512_set1_ps(value)
#define HALVES(at) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(at)))
#define REAL_ZERO() _mm512_setzero_ps()
#define READ(at) _mm512_loadu_ps(at)
#define WRITE(at, v) _mm512_storeu_ps(at, v)
#define ADD_REAL(a, b) _mm512_add_ps(a, b)
#define SIGNED_BYTES(at) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(at)))
#define OR_MASKED(v, bits, mask) _mm512_ternarylogic_epi32(v, bits, _mm512_set1_epi8(mask), 0xf8)
#define LOOK_UP(v, table) \
    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(table))), v)
#if defined(__AVX512VNNI__)
#define FOUR_PRODUCTS(sum, codes, x, wide) _mm512_dpbusd_epi32(sum, codes, x)
#else
#define PAIRS(codes, x) _mm512_madd_epi16(_mm512_maddubs_epi16(codes, x), _mm512_set1_epi16(1))
#define ADD_WHOLE(a, b) _mm512_add_epi32(a, b)
#endif
#elif LANES == 8
typedef __m256i Whole;
typedef __m256 Real;
#define LOAD(at) _mm256_loadu_si256((const __m256i *)(at))
#define LOW_HALVES(v) _mm256_and_si256(v, _mm256_set1_epi8(15))
#define HIGH_HALVES(v) _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15))
#define REPEAT(at) _mm256_set1_epi32(*(const int32_t *)(at))
#define ZERO() _mm256_setzero_si256()
#define TO_REAL(v) _mm256_cvtepi32_ps(v)
#define MULTIPLY(a, b) _mm256_mul_ps(a, b)
#define MULTIPLY_ADD(a, b, c) _mm256_fmadd_ps(a, b, c)
#define REPEAT_REAL(value) _mm256_set1_ps(value)
#define HALVES(at) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at)))
#define REAL_ZERO() _mm256_setzero_ps()
#define READ(at) _mm256_loadu_ps(at)
#define WRITE(at, v) _mm256_storeu_ps(at, v)
#define ADD_REAL(a, b) _mm256_add_ps(a, b)
#define SIGNED_BYTES(at) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at)))
#define OR_MASKED(v, bits, mask) _mm256_or_si256(v, _mm256_and_si256(bits, _mm256_set1_epi8(mask)))
#define LOOK_UP(v, table) \
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(table))), v)
#if defined(__AVXVNNI__)
#define FOUR_PRODUCTS(sum, codes, x, wide) _mm256_dpbusd_avx_epi32(sum, codes, x)
#else
#define PAIRS(codes, x) _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1))
#define ADD_WHOLE(a, b) _mm256_add_epi32(a, b)
#endif
#elif LANES == 4
typedef int32x4_t Whole;
typedef float32x4_t Real;
#define BYTES(v) vreinterpretq_u8_s32(v)
#define SIGNED(v) vreinterpretq_s8_s32(v)
#define LOAD(at) vreinterpretq_s32_u8(vld1q_u8(at))
#define LOW_HALVES(v) vreinterpretq_s32_u8(vandq_u8(BYTES(v), vdupq_n_u8(15)))
#define HIGH_HALVES(v) vreinterpretq_s32_u8(vshrq_n_u8(BYTES(v), 4))
#define REPEAT(at) vdupq_n_s32(*(const int32_t *)(at))
#define ZERO() vdupq_n_s32(0)
#define TO_REAL(v) vcvtq_f32_s32(v)
#define MULTIPLY(a, b) vmulq_f32(a, b)
#define MULTIPLY_ADD(a, b, c) vfmaq_f32(c, a, b)
#define REPEAT_REAL(value) vdupq_n_f32(value)
#define HALVES(at) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at)))
#define REAL_ZERO() vdupq_n_f32(0.0f)
#define READ(at) vld1q_f32(at)
#define WRITE(at, v) vst1q_f32(at, v)
#define ADD_REAL(a, b) vaddq_f32(a, b)
#define OR_MASKED(v, bits, mask) \
    vreinterpretq_s32_u8(vorrq_u8(BYTES(v), vandq_u8(BYTES(bits), vdupq_n_u8(mask))))
INLINE Whole signed_bytes(const uint8_t *at) {
    uint32_t four;
    memcpy(&four, at, 4);
    return vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
}
#define SIGNED_BYTES(at) signed_bytes(at)
#define LOOK_UP(v, table) vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(table), BYTES(v)))
/* Both factors are signed: a code's eighth bit, which counts as -128 then, is taken the other way. */
INLINE Whole four_products(Whole sum, Whole codes, Whole x, int wide) {
    if (!wide) return vdotq_s32(sum, SIGNED(codes), SIGNED(x));
    int8x16_t low = vreinterpretq_s8_u8(vandq_u8(BYTES(codes), vdupq_n_u8(0x7f)));
    int8x16_t high = vreinterpretq_s8_u8(vandq_u8(BYTES(codes), vdupq_n_u8(0x80)));
    sum = vdotq_s32(sum, low, SIGNED(x));
    return vsubq_s32(sum, vdotq_s32(ZERO(), high, SIGNED(x)));
}
#define FOUR_PRODUCTS(sum, codes, x, wide) four_products(sum, codes, x, wide)
#endif

#if defined(LANES)
typedef uint8_t Octets __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

INLINE Whole masked(Whole v, int mask) { return (Whole)((Octets)v & (uint8_t)mask); }

/* Shifted to the left, or for negative places to the right; a mask has to clear what crosses bytes. */
INLINE Whole shifted(Whole v, int places) {
    return places < 0 ? (Whole)((Shorts)v >> -places) : (Whole)((Shorts)v << places);
}

/* Some bits of 32-bit numbers. */
INLINE Whole bits_of_words(Whole v, int place, int mask) { return (Whole)((Words)v >> place & (uint32_t)mask); }
#endif

#if defined(PAIRS)
/* Sums of pairs saturate in 16 bits where a code has its eighth bit: that bit is multiplied on its own. */
INLINE Whole four_products(Whole sum, Whole codes, Whole x, int wide) {
    if (!wide) return ADD_WHOLE(sum, PAIRS(codes, x));
    sum = ADD_WHOLE(sum, PAIRS(masked(codes, 0x7f), x));
    return ADD_WHOLE(sum, PAIRS(masked(codes, 0x80), x));
}
#define FOUR_PRODUCTS(sum, codes, x, wide) four_products(sum, codes, x, wide)
#endif

#endif
