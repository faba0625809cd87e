/* A mixture of experts: for each token the weighted sum of the experts that it is routed to.
 *
 * One expert after another multiplies all rows that are routed to it, so that its weights are read once. A token's
 * results are added in the order of the experts' numbers, whatever the order of its picks: its sum does not depend on
 * the rest of the batch. */

#include "holdfast_cpu.h"

#include <stdlib.h>
#include <string.h>

enum {
    TOKENS_AT_ONCE = 4,
    SUMS_AT_ONCE = 16384, /* additions of a piece of work, about */
};

/* Rows of one expert: `picks[row]` is its place in `shares`, of the token `picks[row] / picks_of_token`. */
typedef struct {
    const Experts *experts;
    const Matrix *inner, *outer;
    const float *x, *shares;
    const int32_t *picks;
    int64_t x_stride;
    int picks_of_token, rows, columns_at_once;
    float *wide, *result, *out;
    Activations narrow, middle;
} Rows;

/* Runs its body for the rows of a piece. */
#define FOR_ROWS(piece, given)                                                                           \
    for (int row = (piece)*TOKENS_AT_ONCE; row < (given)->rows && row < ((piece) + 1) * TOKENS_AT_ONCE; row++)

static void gather_rows(void *context, int piece) {
    Rows *given = context;
    int kinds = kinds_of(given->inner);
    FOR_ROWS(piece, given) {
        int token = given->picks[row] / given->picks_of_token;
        put_row(&given->narrow, row, given->x + token * given->x_stride, kinds);
    }
}

/* In place: of gated forms, the first half of a row is the gate of the second. Comparisons keep NaN. */
static void activate(const Experts *experts, float *row, int width) {
    const float *up = row + width;
    float alpha = experts->alpha, limit = experts->limit;
    switch ((Activation)experts->activation) {
    case GATED_SILU:
        for (int i = 0; i < width; i++) row[i] = row[i] / (1.0f + exponential(-row[i])) * up[i];
        break;
    case GATED_GELU: /* 1 + tanh(u) is 2 / (1 + e^-2u) */
        for (int i = 0; i < width; i++) {
            float u = 0.7978845608f * (row[i] + 0.044715f * row[i] * row[i] * row[i]);
            row[i] = row[i] / (1.0f + exponential(-2.0f * u)) * up[i];
        }
        break;
    case GATED_CLAMPED:
        for (int i = 0; i < width; i++) {
            float gate = row[i] > limit ? limit : row[i];
            float linear = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
            row[i] = gate / (1.0f + exponential(-alpha * gate)) * (linear + 1.0f);
        }
        break;
    case RELU_SQUARED:
        for (int i = 0; i < width; i++) row[i] = row[i] < 0.0f ? 0.0f : row[i] * row[i];
        break;
    }
}

static void activate_rows(void *context, int piece) {
    Rows *given = context;
    int kinds = kinds_of(given->outer);
    FOR_ROWS(piece, given) {
        float *wide = given->wide + (int64_t)row * given->inner->outputs;
        activate(given->experts, wide, given->outer->inputs);
        put_row(&given->middle, row, wide, kinds);
    }
}

/* Some columns of all rows, so that a token which picks an expert twice is added up in order. */
static void add_columns(void *context, int piece) {
    Rows *given = context;
    int outputs = given->outer->outputs, first = piece * given->columns_at_once;
    int end = first + given->columns_at_once < outputs ? first + given->columns_at_once : outputs;
    for (int row = 0; row < given->rows; row++) {
        int pick = given->picks[row];
        float share = given->shares[pick], *out = given->out + (int64_t)(pick / given->picks_of_token) * outputs;
        const float *result = given->result + (int64_t)row * outputs;
        for (int i = first; i < end; i++) out[i] += share * result[i];
    }
}

static void run_expert(Rows *given) {
    int rows = given->rows, outputs = given->outer->outputs, pieces = (rows + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE;
    parallel(gather_rows, given, pieces);
    multiply(given->inner, &given->narrow, given->wide, given->inner->outputs, STORE, 1.0f);
    parallel(activate_rows, given, pieces);
    multiply(given->outer, &given->middle, given->result, outputs, STORE, 1.0f);
    given->columns_at_once = (SUMS_AT_ONCE / rows / PANEL + 1) * PANEL;
    parallel(add_columns, given, (outputs + given->columns_at_once - 1) / given->columns_at_once);
}

/* Sorts the places of picks by expert, in order; `ends[i]` becomes where those of expert i end. Returns the most
 * picks of one expert, or -1 if an id is out of range. */
static int sort_picks(const int64_t *ids, int count, int experts, int32_t *ends, int32_t *picks) {
    int most = 0, before = 0;
    memset(ends, 0, sizeof(int32_t) * experts);
    for (int i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= experts) return -1;
        ends[ids[i]]++;
    }
    for (int expert = 0; expert < experts; expert++) {
        int own = ends[expert];
        if (own > most) most = own;
        ends[expert] = before;
        before += own;
    }
    for (int i = 0; i < count; i++) picks[ends[ids[i]]++] = i;
    return most;
}

static size_t rounded_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* The weighted sums [tokens, outputs] of x [tokens, inputs]; `ids` and `shares` are [tokens, picks]. Returns 0, -1 if
 * out of memory, or -2 for an id out of range. */
int hf_experts(const Experts *experts, const float *x, int64_t x_stride, int tokens, const int64_t *ids,
               const float *shares, int picks, float *out) {
    int count = tokens * picks, inner_kinds = 0, outer_kinds = 0;
    const Matrix *inner = experts->inner, *outer = experts->outer;
    int32_t *sorted = malloc(sizeof(int32_t) * ((size_t)experts->count + count));
    if (!sorted) return -1;
    int32_t *ends = sorted + count;
    int most = sort_picks(ids, count, experts->count, ends, sorted);
    if (most < 0) {
        free(sorted);
        return -2;
    }
    for (int expert = 0; expert < experts->count; expert++) {
        inner_kinds |= kinds_of(&inner[expert]);
        outer_kinds |= kinds_of(&outer[expert]);
    }
    size_t wide = rounded_up(sizeof(float) * most * inner->outputs);
    size_t result = rounded_up(sizeof(float) * most * outer->outputs);
    size_t narrow = activation_bytes(most, inner->inputs, inner_kinds);
    size_t middle = activation_bytes(most, outer->inputs, outer_kinds);
    char *memory = aligned_alloc(64, wide + result + narrow + middle + 64);
    if (!memory) {
        free(sorted);
        return -1;
    }
    memset(out, 0, sizeof(float) * tokens * outer->outputs);
    for (int expert = 0, begin = 0; expert < experts->count; begin = ends[expert++]) {
        int rows = ends[expert] - begin;
        if (rows == 0) continue;
        Rows given = {.experts = experts, .inner = &inner[expert], .outer = &outer[expert], .x = x, .shares = shares,
                      .picks = sorted + begin, .x_stride = x_stride, .picks_of_token = picks, .rows = rows, .out = out};
        given.wide = (float *)memory;
        given.result = (float *)(memory + wide);
        given.narrow = activations_in(memory + wide + result, rows, inner->inputs, inner_kinds);
        given.middle = activations_in(memory + wide + result + narrow, rows, outer->inputs, outer_kinds);
        run_expert(&given);
    }
    free(memory);
    free(sorted);
    return 0;
}
