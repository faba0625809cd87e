/* Weights that are not quantised: how they are laid out, and their products with slices of activations.
 *
 * A panel is a row of pairs of inputs, the last one padded with a zero. BF16: the two numbers of each of 16 outputs
 * lie in 32 bits, the first input in the lower half, so that a shift or a mask makes a float. F16 and F32: 16 numbers
 * of the first input, then of the second.
 *
 * Activations lie in slices of 256 inputs: slice 0 of all rows, then slice 1. The stride of a row is larger than a
 * slice, so that rows do not compete for the same places of the first cache. */

#ifndef HOLDFAST_FLOATS_H
#define HOLDFAST_FLOATS_H

#include "forms.h"

enum { SLICE_STRIDE = SLICE + 16 };

INLINE int is_float(int form) { return form >= BF16; }

INLINE int number_bytes(int form) { return form == F32 ? 4 : 2; }

/* Of a pair of inputs. */
INLINE int pair_bytes(int form) { return 2 * PANEL * number_bytes(form); }

INLINE size_t float_panel_bytes(int form, int inputs) { return (size_t)pair_bytes(form) * ((inputs + 1) / 2); }

/* Of any form. */
INLINE size_t bytes_of_panel(int form, int inputs) {
    return is_float(form) ? float_panel_bytes(form, inputs) : panel_bytes(form, inputs);
}

INLINE int slices_of(int inputs) { return (inputs + SLICE - 1) / SLICE; }

INLINE int depth_of(int inputs, int slice) {
    return inputs - slice * SLICE < SLICE ? inputs - slice * SLICE : SLICE;
}

/* The place of one number in a panel. */
INLINE size_t float_at(int form, int lane, int k) {
    size_t pair = (size_t)pair_bytes(form) * (k / 2);
    return form == BF16 ? pair + lane * 4 + k % 2 * 2 : pair + (k % 2 * PANEL + lane) * number_bytes(form);
}

INLINE float from_bfloat(uint16_t bits) {
    union { uint32_t bits; float value; } result = {(uint32_t)bits << 16};
    return result.value;
}

/* One number of a panel. */
INLINE float number_at(int form, const uint8_t *panel, int lane, int k) {
    const uint8_t *at = panel + float_at(form, lane, k);
    if (form == F32) return *(const float *)at;
    return form == BF16 ? from_bfloat(*(const uint16_t *)at) : from_half(*(const uint16_t *)at);
}

/* Of several rows the products of a slice with one panel, or with two. Sums begin at zero for each slice, and inputs
 * are added in order: each sum is the same, however many rows and panels are multiplied at once. */
typedef struct {
    int form, depth;
    const uint8_t *panels[2]; /* where the slice begins; the second may be NULL */
    const float *x;           /* the slice of the first row; rows follow each other */
    float *sums[2];           /* [rows, sum_stride] of each panel */
    int sum_stride, rows; /* at most `slice_rows` */
    int add; /* to what is in `sums`, which is overwritten otherwise */
} SliceProduct;

void multiply_slice(const SliceProduct *product);

/* Rows that are best multiplied at once. */
int slice_rows(void);

#endif
