/* Declarations of the CPU kernels: types, the thread pool, and the functions that Python calls.
 *
 * Plain C on raw pointers: no torch, no Python. `library.py` compiles these files with the system's
 * compiler for this processor and calls them with ctypes; the structures here are mirrored there.
 * All floats are float32. Nothing here allocates for the caller or keeps a pointer after it returns. */

#ifndef HOLDFAST_CPU_H
#define HOLDFAST_CPU_H

#include <stddef.h>
#include <stdint.h>

enum {
    GROUP = 32, /* elements of a row that share a scale in activations, and a scale at least in weights */
    PANEL = 16, /* outputs of a matrix that are stored interleaved */
    BLOCK_GROUPS = 8, /* groups of a super-block */
    BLOCK = GROUP * BLOCK_GROUPS,
    SLICE = 256, /* inputs whose products with weights that are not quantised are added up on their own */
};

/* The forms of weights (forms.h, floats.h), most with GGUF's name for it. `cpu/structures.py` has the same list. */
typedef enum {
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, E2M1, IQ4_NL, /* scales in half precision for groups of 32 */
    Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS,       /* scales in bytes for groups of 16 or 32, and one for 256 */
    BF16, F16, F32,                             /* not quantised */
    FORMS,
} Form;

/* Some outputs of a matrix that have one form: panels of 16 outputs, the last one padded with zeros. */
typedef struct {
    const uint8_t *blocks;
    int32_t form, panels;
} MatrixPart;

/* A matrix [outputs, inputs]: parts that follow each other; each but the last is whole panels. */
typedef struct {
    const MatrixPart *parts;
    const float *bias; /* [outputs], or NULL */
    int32_t outputs, inputs, part_count, padding;
} Matrix;

/* What `hf_pack` reads: codes, one a byte [outputs, inputs], and the factors that the form has, else NULL. Weights that
 * are not quantised take the place of the codes, in the form's own type. */
typedef struct {
    const uint8_t *codes;
    const float *scales, *minima;         /* [outputs, inputs / 32], or [outputs, inputs / 256] of super-blocks */
    const int8_t *group_scales;           /* of super-blocks: [outputs, inputs / 16 or 32] */
    const uint8_t *group_minima;
    int32_t outputs, inputs, form, padding;
} Unpacked;

/* One decoder layer: attention, then a gated feed-forward part, each after a norm. */
typedef struct {
    const float *attention_norm, *mlp_norm;
    const float *query_norm, *key_norm; /* [head_dim] each, or NULL */
    Matrix qkv, output, gate_up, down;
} Layer;

typedef struct {
    const Layer *layers;
    const float *norm;
    const float *cos_sin; /* [positions, rotary_dim]: cosines, then sines */
    int32_t layer_count, width, inner, heads, kv_heads, head_dim, rotary_dim, window; /* 0: no window */
    float epsilon, scale, residual_multiplier;
    int32_t padding;
} Decoder;

/* The rows of one step and where their keys and values lie. Strides count floats. */
typedef struct {
    const int64_t *positions; /* [tokens] */
    const int64_t *slots;     /* [tokens]: unit * page_size + offset */
    const int32_t *row_start; /* [rows + 1] */
    const int32_t *context;   /* [rows] */
    const int32_t *table;     /* [rows, table_stride] */
    float *keys, *values;     /* unit 0 of the first layer */
    int64_t table_stride, unit_stride, layer_stride, token_stride;
    int32_t rows, tokens, page_size, padding;
} Pages;

/* Rules of one attention call. */
typedef struct {
    const float *sinks; /* [heads], or NULL */
    float scale, softcap; /* softcap 0: none */
    int32_t heads, kv_heads, head_dim, window;
} Attention;

/* What is between the two products of an expert (experts.c). `cpu/structures.py` has the same list. */
typedef enum { GATED_SILU, GATED_GELU, GATED_CLAMPED, RELU_SQUARED } Activation;

/* The two matrices of each expert, of one shape each; gate rows of `inner` come first. `alpha` and `limit` are those of
 * GATED_CLAMPED. */
typedef struct {
    const Matrix *inner, *outer;
    int32_t count, activation;
    float alpha, limit;
} Experts;

/* How each row's token is chosen; a temperature of 0 takes the most likely one. */
typedef struct {
    const float *temperature;
    const int32_t *top_k; /* 0: no limit */
    const float *top_p, *min_p;
    const int64_t *seeds, *positions;
} Choice;

/* The token masks of some rows. Bit `t % 32` of word `t / 32` of a mask says whether token `t` is allowed. */
typedef struct {
    const uint32_t *words;
    const int64_t *rows; /* the mask of each row of logits, or -1 */
    int64_t stride;
    int32_t width; /* words of a mask */
    int32_t padding;
} Masks;

/* The kinds of activations that a matrix is multiplied with; one with parts of both forms takes both. */
enum { EIGHT_BITS = 1, FLOATS = 2 };

/* Activations in 8 bits: `x = code * scale` in groups of 32; `sums` are scale times the sum of the codes.
 * The two halves of each group have sums too, and `offsets`: the sum of the codes times -CENTRE.
 * For weights that are not quantised the numbers themselves, in `floats`: slices of all rows (floats.h).
 * What is not needed is NULL. */
typedef struct {
    int8_t *codes;
    float *scales, *sums, *half_sums;
    int32_t *offsets;
    float *floats;
    int32_t rows, inputs;
} Activations;

typedef enum { STORE, ADD, SWIGLU } Finish;

/* --- threads.c --- */
void parallel(void (*work)(void *context, int index), void *context, int count);
int hf_threads(int wanted);

/* --- activations.c --- */
size_t activation_bytes(int rows, int inputs, int kinds);
Activations activations_in(void *memory, int rows, int inputs, int kinds);
void put_row(const Activations *to, int row, const float *x, int kinds);

/* --- matrix.c --- */
int kinds_of(const Matrix *matrix);
void multiply(const Matrix *matrix, const Activations *x, float *out, int64_t out_stride, Finish finish,
              float multiplier);
int hf_linear(const Matrix *matrix, const float *x, int64_t x_stride, int rows, float *out,
              int64_t out_stride);

/* --- packing.c --- */
int64_t hf_packed_bytes(int form, int outputs, int inputs);
void hf_pack(const Unpacked *from, uint8_t *blocks);
int hf_rows(const Matrix *matrix, const int64_t *rows, int count, float multiplier, float *out);

/* --- floats.c --- */
int hf_widens(void); /* whether weights that are not quantised are multiplied with vectors */

/* --- attention.c --- */
void attend(const Attention *rules, const Pages *pages, int layer, const float *query, int64_t query_stride,
            float *out, int64_t out_stride);
void hf_attend(const Attention *rules, const Pages *pages, const float *query, int64_t query_stride,
               float *out, int64_t out_stride);

/* --- sampling.c --- */
void hf_argmax(const float *values, int64_t stride, int rows, int columns, float *peaks, int64_t *places);
int hf_sample(const float *values, int64_t stride, int rows, int columns, const Choice *choice,
              const Masks *masks, int64_t *tokens);

/* --- experts.c --- */
int hf_experts(const Experts *experts, const float *x, int64_t x_stride, int tokens, const int64_t *ids,
               const float *shares, int picks, float *out);

/* --- decoder.c --- */
int hf_decode(const Decoder *decoder, const Pages *pages, float *x, float *hidden);

/* Returns e^x to within two units in the last place; 0 on underflow, infinity on overflow. Loops over it
 * become vector code. */
static inline float exponential(float x) {
    float clamped = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float whole = __builtin_rintf(clamped * 1.44269504f);
    float rest = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    union { int32_t bits; float value; } power = {((int32_t)whole + 127) << 23};
    float value = sum * power.value;
    return x < -87.0f ? 0.0f : x == x ? value : x;
}

#endif
