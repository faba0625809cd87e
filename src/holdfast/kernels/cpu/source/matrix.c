/* Products of 8-bit activations with 4-bit and 8-bit matrices.
 *
 * Products within a group of 32 are integers, and groups are added in order: a row's result does not depend on
 * the rest of the batch, nor on the number of threads. The inner loop takes 16 or 8 outputs at a time
 * on x86, four on ARM, and is plain C elsewhere. */

#include "holdfast_cpu.h"

#include <stdlib.h>
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

#define INLINE static inline __attribute__((always_inline))

/* Loops over the rows of a work item are unrolled, so that their sums stay in registers. */
#define UNROLL _Pragma("GCC unroll 8")

static size_t block_bytes(int bits) { return (size_t)PANEL * GROUP * bits / 8 + 2 * PANEL * 2; }

/* What 4-bit codes stand for, not negative like all codes: twice each 4-bit float plus 12, and the
 * values of GGUF's IQ4 formats plus 128. */
static const uint8_t TABLES[2][16] = {
    {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
};

/* --- half precision, one number at a time --- */

static float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    union { uint32_t bits; float value; } result;
    if (exponent == 0) {
        result.value = (float)fraction * 0x1p-24f;
        result.bits |= sign;
    } else {
        result.bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    }
    return result.value;
}

static uint16_t to_half(float value) {
    union { float value; uint32_t bits; } given = {value};
    uint32_t sign = given.bits >> 16 & 0x8000, magnitude = given.bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) { /* subnormal: adding a power of two rounds to its last place */
        union { float value; uint32_t bits; } shifted = {.bits = magnitude};
        shifted.value += 0.5f;
        return (uint16_t)(sign | (shifted.bits - 0x3f000000));
    }
    uint32_t rounded = magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | rounded >> 13);
}

/* --- packing --- */

/* Packs codes [outputs, inputs], one a byte, with scales and minima [outputs, inputs / 32]. */
void hf_pack(uint8_t *blocks, const uint8_t *codes, const float *scales, const float *minima, int outputs,
             int inputs, int bits) {
    int groups = inputs / GROUP, panels = (outputs + PANEL - 1) / PANEL;
    size_t bytes = block_bytes(bits), code_bytes = bytes - 4 * PANEL;
    memset(blocks, 0, bytes * groups * panels);
    for (int output = 0; output < outputs; output++) {
        int lane = output % PANEL;
        for (int group = 0; group < groups; group++) {
            uint8_t *block = blocks + bytes * ((size_t)(output / PANEL) * groups + group);
            uint16_t *factors = (uint16_t *)(block + code_bytes);
            const uint8_t *source = codes + (size_t)output * inputs + group * GROUP;
            for (int k = 0; k < GROUP; k++) {
                int run = k / 4, byte = lane * 4 + k % 4;
                if (bits == 8) block[run * 64 + byte] = source[k];
                else block[run / 2 * 64 + byte] |= (uint8_t)(source[k] << (run % 2 * 4));
            }
            factors[lane] = to_half(scales[(size_t)output * groups + group]);
            factors[PANEL + lane] = to_half(minima[(size_t)output * groups + group]);
        }
    }
}

/* Unpacks some rows of a matrix (token embedding). Returns 0, or -1 for a row out of range. */
int hf_rows(const Matrix *matrix, const int64_t *rows, int count, float multiplier, float *out) {
    for (int index = 0; index < count; index++) {
        if (rows[index] < 0 || rows[index] >= matrix->outputs) return -1;
    }
    int groups = matrix->inputs / GROUP, bits = matrix->bits;
    size_t bytes = block_bytes(bits), code_bytes = bytes - 4 * PANEL;
    for (int index = 0; index < count; index++) {
        int lane = (int)(rows[index] % PANEL);
        const uint8_t *block = matrix->blocks + bytes * groups * (size_t)(rows[index] / PANEL);
        for (int group = 0; group < groups; group++, block += bytes) {
            const uint16_t *factors = (const uint16_t *)(block + code_bytes);
            float scale = from_half(factors[lane]), minimum = from_half(factors[PANEL + lane]);
            for (int k = 0; k < GROUP; k++) {
                int run = k / 4, byte = lane * 4 + k % 4;
                int code = bits == 8 ? block[run * 64 + byte] : block[run / 2 * 64 + byte] >> (run % 2 * 4) & 15;
                if (matrix->table) code = TABLES[matrix->table - 1][code];
                *out++ = ((float)code * scale + minimum) * multiplier;
            }
        }
    }
    return 0;
}

/* --- activations --- */

static size_t rounded_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t activation_bytes(int rows, int inputs) {
    return rounded_up((size_t)rows * inputs) + 2 * rounded_up((size_t)rows * (inputs / GROUP) * sizeof(float));
}

Activations activations_in(void *memory, int rows, int inputs) {
    char *scales = (char *)memory + rounded_up((size_t)rows * inputs);
    char *sums = scales + rounded_up((size_t)rows * (inputs / GROUP) * sizeof(float));
    return (Activations){memory, (float *)scales, (float *)sums, rows, inputs};
}

/* Rounds one row to 8 bits. A group with a number that is not finite has a scale that is none either. */
void quantise_row(const Activations *to, int row, const float *x) {
    int groups = to->inputs / GROUP;
    int8_t *codes = to->codes + (size_t)row * to->inputs;
    for (int group = 0; group < groups; group++, x += GROUP, codes += GROUP) {
        int32_t bits[GROUP], largest = 0, total = 0;
        memcpy(bits, x, sizeof bits);
        for (int k = 0; k < GROUP; k++) {
            int32_t magnitude = bits[k] & 0x7fffffff;
            largest = magnitude > largest ? magnitude : largest;
        }
        union { int32_t bits; float value; } peak = {largest};
        float scale = peak.value / 127.0f, inverse = largest ? 127.0f / peak.value : 0.0f;
        if (largest >= 0x7f800000) {
            scale = __builtin_nanf("");
            inverse = 0.0f;
        } else if (!(inverse < 3e38f)) { /* too small to be told from zero */
            inverse = 0.0f;
        }
        for (int k = 0; k < GROUP; k++) {
            int32_t code = (int32_t)__builtin_rintf((largest >= 0x7f800000 ? 0.0f : x[k]) * inverse);
            codes[k] = (int8_t)code;
            total += code;
        }
        to->scales[(size_t)row * groups + group] = scale;
        to->sums[(size_t)row * groups + group] = scale * (float)total;
    }
}

/* --- the inner loops: 16 outputs of `count` rows --- */

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
#define REPEAT_REAL(at) _mm512_set1_ps(*(at))
#define HALVES(at) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(at)))
#define REAL_ZERO() _mm512_setzero_ps()
#define WRITE(at, v) _mm512_storeu_ps(at, v)
#define LOOK_UP(v, table) \
    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(table))), v)
#if defined(__AVX512VNNI__)
#define FOUR_PRODUCTS(sum, codes, x, wide) _mm512_dpbusd_epi32(sum, codes, x)
#else
#define PAIRS(codes, x) _mm512_madd_epi16(_mm512_maddubs_epi16(codes, x), _mm512_set1_epi16(1))
#define ADD_WHOLE(a, b) _mm512_add_epi32(a, b)
#define MASKED(v, mask) _mm512_and_si512(v, _mm512_set1_epi8((char)(mask)))
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
#define REPEAT_REAL(at) _mm256_set1_ps(*(at))
#define HALVES(at) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at)))
#define REAL_ZERO() _mm256_setzero_ps()
#define WRITE(at, v) _mm256_storeu_ps(at, v)
#define LOOK_UP(v, table) \
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(table))), v)
#if defined(__AVXVNNI__)
#define FOUR_PRODUCTS(sum, codes, x, wide) _mm256_dpbusd_avx_epi32(sum, codes, x)
#else
#define PAIRS(codes, x) _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), _mm256_set1_epi16(1))
#define ADD_WHOLE(a, b) _mm256_add_epi32(a, b)
#define MASKED(v, mask) _mm256_and_si256(v, _mm256_set1_epi8((char)(mask)))
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
#define REPEAT_REAL(at) vdupq_n_f32(*(at))
#define HALVES(at) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at)))
#define REAL_ZERO() vdupq_n_f32(0.0f)
#define WRITE(at, v) vst1q_f32(at, v)
#define LOOK_UP(v, table) vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(table), BYTES(v)))
/* Both factors are signed: a code's eighth bit, which counts as -128 then, is taken the other way. */
INLINE Whole four_products(Whole sum, Whole codes, Whole x, int wide) {
    if (!wide) return vdotq_s32(sum, SIGNED(codes), SIGNED(x));
    Whole low = vreinterpretq_s32_u8(vandq_u8(BYTES(codes), vdupq_n_u8(0x7f)));
    Whole high = vreinterpretq_s32_u8(vandq_u8(BYTES(codes), vdupq_n_u8(0x80)));
    sum = vdotq_s32(sum, SIGNED(low), SIGNED(x));
    return vsubq_s32(sum, vdotq_s32(ZERO(), SIGNED(high), SIGNED(x)));
}
#define FOUR_PRODUCTS(sum, codes, x, wide) four_products(sum, codes, x, wide)
#endif

#if defined(PAIRS)
/* Sums of pairs saturate in 16 bits where a code has its eighth bit: that bit is multiplied on its own. */
INLINE Whole four_products(Whole sum, Whole codes, Whole x, int wide) {
    if (!wide) return ADD_WHOLE(sum, PAIRS(codes, x));
    sum = ADD_WHOLE(sum, PAIRS(MASKED(codes, 0x7f), x));
    return ADD_WHOLE(sum, PAIRS(MASKED(codes, 0x80), x));
}
#define FOUR_PRODUCTS(sum, codes, x, wide) four_products(sum, codes, x, wide)
#endif

#if defined(LANES)
INLINE void panel_part(const uint8_t *block, int bits, int table, const Activations *x, int row, int count,
                       int part, float out[][PANEL]) {
    int groups = x->inputs / GROUP;
    size_t bytes = block_bytes(bits), code_bytes = bytes - 4 * PANEL;
    const int8_t *codes_of_x = x->codes + (size_t)row * x->inputs;
    const float *scales_of_x = x->scales + (size_t)row * groups, *sums = x->sums + (size_t)row * groups;
    Real total[8];
    UNROLL for (int r = 0; r < count; r++) total[r] = REAL_ZERO();
    for (int group = 0; group < groups; group++, block += bytes) {
        const uint8_t *at = block + part * LANES * 4;
        Whole codes[8];
        UNROLL for (int run = 0; run < 8; run++) {
            if (bits == 8) codes[run] = LOAD(at + run * 64);
            else if (run % 2 == 0) codes[run] = LOW_HALVES(LOAD(at + run / 2 * 64));
            else codes[run] = HIGH_HALVES(LOAD(at + run / 2 * 64));
            if (table) codes[run] = LOOK_UP(codes[run], TABLES[table - 1]);
        }
        const uint16_t *factors = (const uint16_t *)(block + code_bytes) + part * LANES;
        Real scale = HALVES(factors), minimum = HALVES(factors + PANEL);
        UNROLL for (int r = 0; r < count; r++) {
            const int8_t *q = codes_of_x + (size_t)r * x->inputs + group * GROUP;
            Whole sum = ZERO();
            UNROLL for (int run = 0; run < 8; run++) {
                sum = FOUR_PRODUCTS(sum, codes[run], REPEAT(q + run * 4), bits == 8 || table == IQ4);
            }
            Real scaled = MULTIPLY(TO_REAL(sum), scale);
            total[r] = MULTIPLY_ADD(scaled, REPEAT_REAL(scales_of_x + r * groups + group), total[r]);
            total[r] = MULTIPLY_ADD(minimum, REPEAT_REAL(sums + r * groups + group), total[r]);
        }
    }
    UNROLL for (int r = 0; r < count; r++) WRITE(out[r] + part * LANES, total[r]);
}
#else
INLINE void panel_part(const uint8_t *block, int bits, int table, const Activations *x, int row, int count,
                       int part, float out[][PANEL]) {
    (void)part;
    int groups = x->inputs / GROUP;
    size_t bytes = block_bytes(bits), code_bytes = bytes - 4 * PANEL;
    memset(out, 0, sizeof(float) * PANEL * count);
    for (int group = 0; group < groups; group++, block += bytes) {
        const uint16_t *factors = (const uint16_t *)(block + code_bytes);
        float scale[PANEL], minimum[PANEL];
        for (int lane = 0; lane < PANEL; lane++) {
            scale[lane] = from_half(factors[lane]);
            minimum[lane] = from_half(factors[PANEL + lane]);
        }
        for (int r = 0; r < count; r++) {
            const int8_t *q = x->codes + (size_t)(row + r) * x->inputs + group * GROUP;
            int32_t sum[PANEL] = {0};
            for (int run = 0; run < 8; run++) {
                const uint8_t *codes = block + (bits == 8 ? run : run / 2) * 64;
                int shift = bits == 8 ? 0 : run % 2 * 4, mask = bits == 8 ? 255 : 15;
                for (int lane = 0; lane < PANEL; lane++) {
                    for (int k = 0; k < 4; k++) {
                        int code = codes[lane * 4 + k] >> shift & mask;
                        sum[lane] += (table ? TABLES[table - 1][code] : code) * q[run * 4 + k];
                    }
                }
            }
            float scale_of_x = x->scales[(size_t)(row + r) * groups + group];
            float sum_of_x = x->sums[(size_t)(row + r) * groups + group];
            for (int lane = 0; lane < PANEL; lane++) {
                /* One product at a time: of a sum of two, compilers fuse now one and now the other. */
                out[r][lane] += (float)sum[lane] * scale[lane] * scale_of_x;
                out[r][lane] += minimum[lane] * sum_of_x;
            }
        }
    }
}
#define LANES PANEL
#endif

enum { ROWS_AT_ONCE = 8 };

INLINE void panel_rows(const uint8_t *block, int bits, int table, const Activations *x, int row, int count,
                       float out[][PANEL]) {
    for (int part = 0; part < PANEL / LANES; part++) panel_part(block, bits, table, x, row, count, part, out);
}

/* 16 outputs of up to eight rows; the number of rows is a constant in each branch. */
static void panel(const Matrix *matrix, int index, const Activations *x, int row, int count,
                  float out[][PANEL]) {
    const uint8_t *block = matrix->blocks + block_bytes(matrix->bits) * (matrix->inputs / GROUP) * (size_t)index;
    int done = 0;
#define ROWS(number)                                                                                     \
    for (; count - done >= number; done += number) {                                                     \
        if (matrix->table == E2M1) panel_rows(block, 4, E2M1, x, row + done, number, out + done);        \
        else if (matrix->table) panel_rows(block, 4, IQ4, x, row + done, number, out + done);            \
        else if (matrix->bits == 4) panel_rows(block, 4, 0, x, row + done, number, out + done);          \
        else panel_rows(block, 8, 0, x, row + done, number, out + done);                                 \
    }
    ROWS(8)
    ROWS(4)
    ROWS(2)
    ROWS(1)
#undef ROWS
}

/* --- whole products --- */

typedef struct {
    const Matrix *matrix;
    const Activations *x;
    float *out;
    int64_t out_stride;
    Finish finish;
    float multiplier;
    int panels, panels_at_once;
} Product;

static void finish_panel(const Product *product, int index, int row, float sums[PANEL], float ups[PANEL]) {
    const Matrix *matrix = product->matrix;
    int outputs = product->finish == SWIGLU ? matrix->outputs / 2 : matrix->outputs;
    int first = index * PANEL, count = outputs - first < PANEL ? outputs - first : PANEL;
    float *out = product->out + row * product->out_stride + first;
    if (matrix->bias) {
        for (int lane = 0; lane < count; lane++) sums[lane] += matrix->bias[first + lane];
    }
    switch (product->finish) {
    case STORE:
        for (int lane = 0; lane < count; lane++) out[lane] = sums[lane];
        break;
    case ADD:
        for (int lane = 0; lane < count; lane++) out[lane] += product->multiplier * sums[lane];
        break;
    case SWIGLU:
        if (matrix->bias) {
            for (int lane = 0; lane < count; lane++) ups[lane] += matrix->bias[outputs + first + lane];
        }
        for (int lane = 0; lane < count; lane++) {
            out[lane] = sums[lane] / (1.0f + exponential(-sums[lane])) * ups[lane];
        }
        break;
    }
}

static void product_piece(void *context, int piece) {
    const Product *product = context;
    int first = piece * product->panels_at_once, end = first + product->panels_at_once;
    if (end > product->panels) end = product->panels;
    float sums[ROWS_AT_ONCE][PANEL], ups[ROWS_AT_ONCE][PANEL];
    for (int index = first; index < end; index++) {
        for (int row = 0; row < product->x->rows; row += ROWS_AT_ONCE) {
            int left = product->x->rows - row, count = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
            panel(product->matrix, index, product->x, row, count, sums);
            if (product->finish == SWIGLU) {
                panel(product->matrix, product->panels + index, product->x, row, count, ups);
            }
            for (int r = 0; r < count; r++) finish_panel(product, index, row + r, sums[r], ups[r]);
        }
    }
}

/* Multiplies all rows with a matrix. SWIGLU takes the first half of the outputs as gates of the second; both
 * halves must be whole panels. ADD adds `multiplier` times the product. */
void multiply(const Matrix *matrix, const Activations *x, float *out, int64_t out_stride, Finish finish,
              float multiplier) {
    int outputs = finish == SWIGLU ? matrix->outputs / 2 : matrix->outputs;
    int panels = (outputs + PANEL - 1) / PANEL;
    /* A piece takes about five microseconds of one core at least, so that sharing out stays cheap. */
    int64_t work = (int64_t)matrix->inputs * x->rows * (finish == SWIGLU ? 2 : 1);
    int at_once = (int)(12000 / work) + 1;
    Product product = {matrix, x, out, out_stride, finish, multiplier, panels, at_once};
    parallel(product_piece, &product, (panels + at_once - 1) / at_once);
}

typedef struct {
    Activations to;
    const float *x;
    int64_t stride;
} Rounding;

static void rounding_piece(void *context, int piece) {
    Rounding *rounding = context;
    int end = (piece + 1) * ROWS_AT_ONCE < rounding->to.rows ? (piece + 1) * ROWS_AT_ONCE : rounding->to.rows;
    for (int row = piece * ROWS_AT_ONCE; row < end; row++) {
        quantise_row(&rounding->to, row, rounding->x + row * rounding->stride);
    }
}

/* One product on its own: x [rows, inputs] in floats. Returns 0, or -1 if out of memory. */
int hf_linear(const Matrix *matrix, const float *x, int64_t x_stride, int rows, float *out,
              int64_t out_stride) {
    void *memory = aligned_alloc(64, rounded_up(activation_bytes(rows, matrix->inputs)));
    if (!memory) return -1;
    Rounding rounding = {activations_in(memory, rows, matrix->inputs), x, x_stride};
    parallel(rounding_piece, &rounding, (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE);
    multiply(matrix, &rounding.to, out, out_stride, STORE, 1.0f);
    free(memory);
    return 0;
}
