/* A whole forward pass of a decoder of attention and gated MLP layers, in one call.
 *
 * The residual stream stays in floats; projections with quantised weights round it to 8 bits. Per-token work (norms,
 * rotary embedding, rounding) is parallel over tokens, products over outputs, attention over heads. */

#include "holdfast_cpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS_AT_ONCE = 4 };

/* One step's buffers and what the pieces of work read. */
typedef struct {
    const Decoder *decoder;
    const Pages *pages;
    const Layer *layer;
    int layer_index;
    float *x, *qkv, *mixed, *inner, *hidden;
    Activations narrow, heads, wide; /* as wide as the model, its heads, its feed-forward part */
} Step;

static void norm_row(const float *x, const float *weight, int width, float epsilon, float *out) {
    float lanes[PANEL] = {0}, squares = 0.0f;
    int first = 0;
    for (; first + PANEL <= width; first += PANEL) {
        for (int lane = 0; lane < PANEL; lane++) lanes[lane] += x[first + lane] * x[first + lane];
    }
    for (; first < width; first++) squares += x[first] * x[first];
    for (int lane = 0; lane < PANEL; lane++) squares += lanes[lane];
    float factor = 1.0f / sqrtf(squares / (float)width + epsilon);
    for (int i = 0; i < width; i++) out[i] = x[i] * factor * weight[i];
}

/* Runs `row_work` for the tokens of a piece. */
#define FOR_TOKENS(piece, step)                                                                          \
    for (int token = (piece)*TOKENS_AT_ONCE;                                                             \
         token < (step)->pages->tokens && token < ((piece) + 1) * TOKENS_AT_ONCE; token++)

static void norm_tokens(Step *step, int piece, const float *weight, const Matrix *next) {
    int width = step->decoder->width, kinds = kinds_of(next);
    FOR_TOKENS(piece, step) {
        float *normed = step->hidden + (int64_t)token * width;
        norm_row(step->x + (int64_t)token * width, weight, width, step->decoder->epsilon, normed);
        put_row(&step->narrow, token, normed, kinds);
    }
}

static void before_attention(void *context, int piece) {
    Step *step = context;
    norm_tokens(step, piece, step->layer->attention_norm, &step->layer->qkv);
}

static void before_mlp(void *context, int piece) {
    Step *step = context;
    norm_tokens(step, piece, step->layer->mlp_norm, &step->layer->gate_up);
}

static void after_layers(void *context, int piece) {
    Step *step = context;
    int width = step->decoder->width;
    FOR_TOKENS(piece, step) {
        int64_t at = (int64_t)token * width;
        norm_row(step->x + at, step->decoder->norm, width, step->decoder->epsilon, step->hidden + at);
    }
}

/* Dimension i turns with dimension i + half. */
static void turn(float *head, const float *cos_sin, int half) {
    for (int i = 0; i < half; i++) {
        float first = head[i], second = head[half + i], cosine = cos_sin[i], sine = cos_sin[half + i];
        head[i] = first * cosine - second * sine;
        head[half + i] = second * cosine + first * sine;
    }
}

static void rotate_and_write(void *context, int piece) {
    Step *step = context;
    const Decoder *decoder = step->decoder;
    const Pages *pages = step->pages;
    int dim = decoder->head_dim, keys = decoder->kv_heads * dim, queries = decoder->heads * dim;
    FOR_TOKENS(piece, step) {
        float *heads = step->qkv + (int64_t)token * (queries + 2 * keys);
        const float *cos_sin = decoder->cos_sin + pages->positions[token] * decoder->rotary_dim;
        for (int head = 0; head < decoder->heads + decoder->kv_heads; head++) {
            const float *norm = head < decoder->heads ? step->layer->query_norm : step->layer->key_norm;
            if (norm) norm_row(heads + head * dim, norm, dim, decoder->epsilon, heads + head * dim);
            turn(heads + head * dim, cos_sin, decoder->rotary_dim / 2);
        }
        int64_t slot = pages->slots[token], unit = slot / pages->page_size;
        int64_t at = unit * pages->unit_stride + step->layer_index * pages->layer_stride +
                     slot % pages->page_size * pages->token_stride;
        memcpy(pages->keys + at, heads + queries, sizeof(float) * keys);
        memcpy(pages->values + at, heads + queries + keys, sizeof(float) * keys);
    }
}

static void put_mixed(void *context, int piece) {
    Step *step = context;
    int kinds = kinds_of(&step->layer->output);
    FOR_TOKENS(piece, step) put_row(&step->heads, token, step->mixed + (int64_t)token * step->heads.inputs, kinds);
}

static void put_inner(void *context, int piece) {
    Step *step = context;
    int kinds = kinds_of(&step->layer->down);
    FOR_TOKENS(piece, step) put_row(&step->wide, token, step->inner + (int64_t)token * step->wide.inputs, kinds);
}

static void run_layer(Step *step, int pieces) {
    const Decoder *decoder = step->decoder;
    const Layer *layer = step->layer;
    int dim = decoder->head_dim, queries = decoder->heads * dim;
    int fused = queries + 2 * decoder->kv_heads * dim;
    Attention rules = {NULL, decoder->scale, 0.0f, decoder->heads, decoder->kv_heads, dim, decoder->window};
    parallel(before_attention, step, pieces);
    multiply(&layer->qkv, &step->narrow, step->qkv, fused, STORE, 1.0f);
    parallel(rotate_and_write, step, pieces);
    attend(&rules, step->pages, step->layer_index, step->qkv, fused, step->mixed, queries);
    parallel(put_mixed, step, pieces);
    multiply(&layer->output, &step->heads, step->x, decoder->width, ADD, decoder->residual_multiplier);
    parallel(before_mlp, step, pieces);
    multiply(&layer->gate_up, &step->narrow, step->inner, decoder->inner, SWIGLU, 1.0f);
    parallel(put_inner, step, pieces);
    multiply(&layer->down, &step->wide, step->x, decoder->width, ADD, decoder->residual_multiplier);
}

static float *take_floats(char **memory, size_t count) {
    float *taken = (float *)*memory;
    *memory += (count * sizeof(float) + 63) / 64 * 64;
    return taken;
}

static Activations take_activations(char **memory, int rows, int inputs, int kinds) {
    Activations taken = activations_in(*memory, rows, inputs, kinds);
    *memory += activation_bytes(rows, inputs, kinds);
    return taken;
}

/* The kinds of activations that the projections of all layers take: those after a norm, after attention, and the last. */
typedef struct {
    int narrow, heads, wide;
} Kinds;

static Kinds kinds_of_layers(const Decoder *decoder) {
    Kinds found = {0, 0, 0};
    for (int index = 0; index < decoder->layer_count; index++) {
        const Layer *layer = &decoder->layers[index];
        found.narrow |= kinds_of(&layer->qkv) | kinds_of(&layer->gate_up);
        found.heads |= kinds_of(&layer->output);
        found.wide |= kinds_of(&layer->down);
    }
    return found;
}

/* Runs all layers over x [tokens, width], which is changed; writes the normed result to `hidden`.
 * Returns 0, or -1 if out of memory. */
int hf_decode(const Decoder *decoder, const Pages *pages, float *x, float *hidden) {
    int tokens = pages->tokens, queries = decoder->heads * decoder->head_dim;
    int fused = queries + 2 * decoder->kv_heads * decoder->head_dim;
    size_t floats = (size_t)tokens * (fused + queries + decoder->inner) + 3 * 16;
    Kinds kinds = kinds_of_layers(decoder);
    size_t bytes = floats * sizeof(float) + activation_bytes(tokens, decoder->width, kinds.narrow) +
                   activation_bytes(tokens, queries, kinds.heads) +
                   activation_bytes(tokens, decoder->inner, kinds.wide);
    char *memory = aligned_alloc(64, (bytes + 63) / 64 * 64), *next = memory;
    if (!memory) return -1;
    Step step = {.decoder = decoder, .pages = pages, .x = x, .hidden = hidden};
    step.qkv = take_floats(&next, (size_t)tokens * fused);
    step.mixed = take_floats(&next, (size_t)tokens * queries);
    step.inner = take_floats(&next, (size_t)tokens * decoder->inner);
    step.narrow = take_activations(&next, tokens, decoder->width, kinds.narrow);
    step.heads = take_activations(&next, tokens, queries, kinds.heads);
    step.wide = take_activations(&next, tokens, decoder->inner, kinds.wide);
    int pieces = (tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE;
    for (int index = 0; index < decoder->layer_count; index++) {
        step.layer = &decoder->layers[index];
        step.layer_index = index;
        run_layer(&step, pieces);
    }
    parallel(after_layers, &step, pieces);
    free(memory);
    return 0;
}
