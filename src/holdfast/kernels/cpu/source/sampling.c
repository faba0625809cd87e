/* The next token of each row: greedy, or sampled.
 *
 * The rules are those of `kernels/torch/sampling.py`: the tokens that top-k, top-p and min-p keep run a race of
 * exponential waiting times, a function of (seed, position, token), over their weights. The kept set is found
 * without a full sort: weights are counted in buckets (radix select), and only the bucket with the limit is
 * sorted. A work item is a row. The logits of tokens that a row's mask does not allow count as -inf. */

#include "holdfast_cpu.h"

#include <math.h>
#include <stdlib.h>

enum { BUCKET_SHIFT = 18, BUCKETS = (0x3f800000 >> BUCKET_SHIFT) + 1, NO_TOKEN = -1 };

/* The greatest of some values, NaN where one of them is, and its first place. */
static float greatest(const float *at, int columns, int64_t *place) {
    float best[PANEL], peak = -__builtin_inff();
    int unordered = 0, column = 0;
    for (int lane = 0; lane < PANEL; lane++) best[lane] = -__builtin_inff();
    for (; column + PANEL <= columns; column += PANEL) {
        for (int lane = 0; lane < PANEL; lane++) {
            float value = at[column + lane];
            best[lane] = value > best[lane] ? value : best[lane];
            unordered |= value != value;
        }
    }
    for (int lane = 0; lane < PANEL; lane++) peak = best[lane] > peak ? best[lane] : peak;
    for (; column < columns; column++) {
        peak = at[column] > peak ? at[column] : peak;
        unordered |= at[column] != at[column];
    }
    *place = 0;
    while (*place < columns - 1 && at[*place] != peak) ++*place;
    return unordered ? __builtin_nanf("") : peak;
}

typedef struct {
    const float *values;
    int64_t stride;
    int columns;
    float *peaks;
    int64_t *places;
} Search;

static void search_piece(void *context, int row) {
    const Search *search = context;
    search->peaks[row] = greatest(search->values + row * search->stride, search->columns, search->places + row);
}

/* The largest value of each row and its first place; a row with NaN has the peak NaN. */
void hf_argmax(const float *values, int64_t stride, int rows, int columns, float *peaks, int64_t *places) {
    Search search = {values, stride, columns, peaks, places};
    parallel(search_piece, &search, rows);
}

/* --- waiting times --- */

/* A bijection in which every input bit reaches every output bit. */
static inline uint32_t mixed(uint32_t value) {
    value ^= value >> 16;
    value *= 0x7FEB352Du;
    value ^= value >> 15;
    value *= 0x846CA68Bu;
    return value ^ value >> 16;
}

static uint32_t stream_of(int64_t seed, int64_t position) {
    uint32_t stream = mixed((uint32_t)seed ^ 0x9E3779B9u);
    stream = mixed(stream ^ (uint32_t)((uint64_t)seed >> 32));
    return mixed(stream + (uint32_t)position);
}

/* -log(1 - u) for the uniform number u that 23 bits make; 1 - u is exact, and never 0 or 1. */
static inline float waiting_time(uint32_t bits) {
    union { float value; int32_t bits; } left = {1.0f - ((float)(int32_t)bits + 0.5f) * 0x1p-23f};
    int32_t shifted = left.bits + (0x3f800000 - 0x3f3504f3);
    float exponent = (float)((shifted >> 23) - 127);
    left.bits = (shifted & 0x7fffff) + 0x3f3504f3; /* between the roots of a half and of two */
    float rest = left.value - 1.0f, square = rest * rest, sum = 7.0376836292e-2f;
    sum = sum * rest - 1.1514610310e-1f;
    sum = sum * rest + 1.1676998740e-1f;
    sum = sum * rest - 1.2420140846e-1f;
    sum = sum * rest + 1.4249322787e-1f;
    sum = sum * rest - 1.6668057665e-1f;
    sum = sum * rest + 2.0000714765e-1f;
    sum = sum * rest - 2.4999993993e-1f;
    sum = sum * rest + 3.3333331174e-1f;
    sum = sum * rest * square - exponent * 2.12194440e-4f - 0.5f * square;
    return -(rest + sum + exponent * 0.693359375f);
}

/* --- draws --- */

typedef struct {
    const float *values;
    int64_t stride;
    int columns;
    const Choice *choice;
    const Masks *masks; /* NULL: no row has a mask */
    int64_t *tokens;
    int *failed;
} Draws;

static int descending(const void *one, const void *other) {
    float a = *(const float *)one, b = *(const float *)other;
    return (a < b) - (a > b);
}

/* e^(scaled - peak), never above 1, though rounding may lift a scaled value above the peak. */
static inline float weight_of(float value, float factor, float peak) {
    float below = value * factor - peak;
    return exponential(below > 0.0f ? 0.0f : below);
}

static inline int bucket_of(float weight) {
    union { float value; int32_t bits; } seen = {weight};
    return seen.bits >> BUCKET_SHIFT;
}

/* The least scaled value that top-k and top-p leave, ties included; the most likely token always stays.
 * `weights` are e^(scaled - peak), `found` has room for a bucket. */
static float least_kept(const float *at, const float *weights, int columns, float factor, float peak,
                        int limit, float share, double total, float *found) {
    int counts[BUCKETS] = {0};
    double masses[BUCKETS] = {0}, before = 0.0, target = (double)share * total;
    int bucket = BUCKETS - 1, rank = 0, count = 0;
    for (int token = 0; token < columns; token++) {
        int of = bucket_of(weights[token]);
        counts[of]++;
        masses[of] += weights[token];
    }
    for (; bucket >= 0; bucket--) {
        if (rank + counts[bucket] >= limit || (share < 1.0f && before + masses[bucket] >= target)) break;
        rank += counts[bucket];
        before += masses[bucket];
    }
    if (bucket < 0) return -__builtin_inff();
    for (int token = 0; token < columns; token++) {
        if (bucket_of(weights[token]) == bucket) found[count++] = at[token] * factor;
    }
    qsort(found, count, sizeof *found, descending);
    float least = peak;
    for (int index = 0; index < count; index++, rank++) {
        if (rank && (rank >= limit || (share < 1.0f && before >= target))) break;
        least = found[index];
        before += exponential(found[index] - peak);
    }
    return least;
}

/* The winner of the race in one row, whose most likely token is `place`; -1 when there is no memory. */
static int64_t draw(const Draws *draws, const float *at, int row, float top, int64_t place) {
    const Choice *choice = draws->choice;
    int columns = draws->columns, limit = choice->top_k[row];
    float factor = 1.0f / choice->temperature[row], peak = top * factor, share = choice->top_p[row];
    float least = choice->min_p[row] > 0.0f ? peak + logf(choice->min_p[row]) : -__builtin_inff();
    if (!isfinite(peak)) return place; /* so cold that nothing else has a chance */
    float *weights = malloc(2 * sizeof(float) * columns);
    if (!weights) return -1;
    double sums[PANEL] = {0}, total = 0.0;
    int token = 0;
    for (; token + PANEL <= columns; token += PANEL) {
        for (int lane = 0; lane < PANEL; lane++) {
            weights[token + lane] = weight_of(at[token + lane], factor, peak);
            sums[lane] += weights[token + lane];
        }
    }
    for (; token < columns; token++) total += weights[token] = weight_of(at[token], factor, peak);
    for (int lane = 0; lane < PANEL; lane++) total += sums[lane];
    limit = limit > 0 && limit < columns ? limit : columns;
    if (limit < columns || share < 1.0f) {
        float bound = least_kept(at, weights, columns, factor, peak, limit, share, total, weights + columns);
        least = bound > least ? bound : least;
    }
    uint32_t stream = stream_of(choice->seeds[row], choice->positions[row]);
    for (token = 0; token < columns; token++) {
        uint32_t bits = mixed(mixed((uint32_t)token + stream) ^ stream) >> 9;
        float speed = weights[token] / waiting_time(bits);
        weights[token] = at[token] * factor >= least ? speed : -1.0f;
    }
    greatest(weights, columns, &place);
    free(weights);
    return place;
}

/* A copy of a row in which tokens that its mask does not allow, or does not reach, are -inf; NULL when there is no
 * memory. */
static float *masked_row(const float *at, int columns, const uint32_t *mask, int words) {
    float *masked = malloc(sizeof(float) * columns);
    if (!masked) return NULL;
    for (int word = 0; word * 32 < columns; word++) {
        int first = word * 32, count = columns - first < 32 ? columns - first : 32;
        uint32_t bits = word < words ? mask[word] : 0;
        for (int bit = 0; bit < count; bit++) {
            masked[first + bit] = bits >> bit & 1 ? at[first + bit] : -__builtin_inff();
        }
    }
    return masked;
}

static void draw_piece(void *context, int row) {
    const Draws *draws = context;
    const Masks *masks = draws->masks;
    const float *at = draws->values + row * draws->stride;
    float *masked = NULL;
    int64_t place;
    if (masks && masks->rows[row] >= 0) {
        masked = masked_row(at, draws->columns, masks->words + masks->rows[row] * masks->stride, masks->width);
        if (!masked) {
            *draws->failed = 1;
            draws->tokens[row] = NO_TOKEN;
            return;
        }
        at = masked;
    }
    float top = greatest(at, draws->columns, &place);
    if (!isfinite(top)) place = NO_TOKEN;
    else if (draws->choice->temperature[row] > 0.0f) {
        place = draw(draws, at, row, top, place);
        if (place < 0) *draws->failed = 1;
    }
    draws->tokens[row] = place;
    free(masked);
}

/* The tokens of all rows, -1 where a row holds NaN or no finite maximum among the tokens that its mask allows.
 * Without masks `masks` is NULL. Returns 0, or -1 when there is no memory. */
int hf_sample(const float *values, int64_t stride, int rows, int columns, const Choice *choice,
              const Masks *masks, int64_t *tokens) {
    int failed = 0;
    Draws draws = {values, stride, columns, choice, masks, tokens, &failed};
    parallel(draw_piece, &draws, rows);
    return failed ? -1 : 0;
}
