/* Activations as the products read them: in 8 bits, and in slices of floats. */

#include "floats.h"

#include <string.h>

static size_t rounded_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Of one of the arrays that have a number for each group. */
static size_t numbers_bytes(int rows, int inputs, int numbers_of_group) {
    return rounded_up((size_t)rows * (inputs / GROUP) * numbers_of_group * sizeof(float));
}

static size_t eight_bit_bytes(int rows, int inputs) {
    return rounded_up((size_t)rows * inputs) + 2 * numbers_bytes(rows, inputs, 1) + 2 * numbers_bytes(rows, inputs, 2);
}

size_t activation_bytes(int rows, int inputs, int kinds) {
    size_t floats = (size_t)slices_of(inputs) * rows * SLICE_STRIDE * sizeof(float);
    return (kinds & EIGHT_BITS ? eight_bit_bytes(rows, inputs) : 0) + (kinds & FLOATS ? rounded_up(floats) : 0);
}

Activations activations_in(void *memory, int rows, int inputs, int kinds) {
    Activations found = {.rows = rows, .inputs = inputs};
    char *next = memory;
    if (kinds & EIGHT_BITS) {
        found.codes = (int8_t *)next;
        found.scales = (float *)(next + rounded_up((size_t)rows * inputs));
        found.sums = found.scales + numbers_bytes(rows, inputs, 1) / sizeof(float);
        found.half_sums = found.sums + numbers_bytes(rows, inputs, 1) / sizeof(float);
        found.offsets = (int32_t *)(found.half_sums + numbers_bytes(rows, inputs, 2) / sizeof(float));
        next += eight_bit_bytes(rows, inputs);
    }
    if (kinds & FLOATS) found.floats = (float *)next;
    return found;
}

static void slice_row(const Activations *to, int row, const float *x) {
    for (int slice = 0; slice < slices_of(to->inputs); slice++) {
        float *out = to->floats + ((size_t)slice * to->rows + row) * SLICE_STRIDE;
        int depth = depth_of(to->inputs, slice);
        memcpy(out, x + slice * SLICE, sizeof(float) * depth);
        out[depth] = 0.0f; /* of an odd depth the other of a pair */
    }
}

/* Rounds one row to 8 bits. A group with a number that is not finite has a scale that is none either. */
static void quantise_row(const Activations *to, int row, const float *x) {
    int groups = to->inputs / GROUP;
    int8_t *codes = to->codes + (size_t)row * to->inputs;
    for (int group = 0; group < groups; group++, x += GROUP, codes += GROUP) {
        int32_t bits[GROUP], largest = 0, totals[2] = {0};
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
            codes[k] = (int8_t)__builtin_rintf((largest >= 0x7f800000 ? 0.0f : x[k]) * inverse);
        }
        for (int half = 0; half < 2; half++) {
            for (int k = 0; k < GROUP / 2; k++) totals[half] += codes[half * GROUP / 2 + k];
        }
        size_t at = (size_t)row * groups + group;
        to->scales[at] = scale;
        to->sums[at] = scale * (float)(totals[0] + totals[1]);
        for (int half = 0; half < 2; half++) {
            to->half_sums[2 * at + half] = scale * (float)totals[half];
            to->offsets[2 * at + half] = -CENTRE * totals[half];
        }
    }
}

/* Writes one row in the kinds that a product takes. */
void put_row(const Activations *to, int row, const float *x, int kinds) {
    if (kinds & EIGHT_BITS) quantise_row(to, row, x);
    if (kinds & FLOATS) slice_row(to, row, x);
}
