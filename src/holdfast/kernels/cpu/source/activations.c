/* Activations in 8 bits, as the products read them. */

#include "forms.h"

#include <string.h>

static size_t rounded_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Of one of the arrays that have a number for each group. */
static size_t numbers_bytes(int rows, int inputs, int numbers_of_group) {
    return rounded_up((size_t)rows * (inputs / GROUP) * numbers_of_group * sizeof(float));
}

size_t activation_bytes(int rows, int inputs) {
    return rounded_up((size_t)rows * inputs) + 2 * numbers_bytes(rows, inputs, 1) + 2 * numbers_bytes(rows, inputs, 2);
}

Activations activations_in(void *memory, int rows, int inputs) {
    char *scales = (char *)memory + rounded_up((size_t)rows * inputs);
    char *sums = scales + numbers_bytes(rows, inputs, 1);
    char *half_sums = sums + numbers_bytes(rows, inputs, 1);
    char *offsets = half_sums + numbers_bytes(rows, inputs, 2);
    return (Activations){memory, (float *)scales, (float *)sums, (float *)half_sums, (int32_t *)offsets, rows, inputs};
}

/* Rounds one row to 8 bits. A group with a number that is not finite has a scale that is none either. */
void quantise_row(const Activations *to, int row, const float *x) {
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
