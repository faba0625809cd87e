/* Products of floats with weights that are not quantised, which are widened to floats in registers. */

#include "floats.h"
#include "lanes.h"

#define UNROLL _Pragma("GCC unroll 16")

enum { BYTES_AHEAD = 2048 }; /* how far ahead of its use a weight is fetched */

#if defined(LANES)
enum { PARTS = PANEL / LANES };

#if LANES == 16
enum { ROWS_MOST = 12, ROWS_OF_PAIRS = 12 }; /* rows at once: with one panel, and with two, as registers allow */
#elif LANES == 8
enum { ROWS_MOST = 6, ROWS_OF_PAIRS = 2 };
#else
enum { ROWS_MOST = 4, ROWS_OF_PAIRS = 2 };
#endif

/* LANES outputs of one of a pair of inputs. */
INLINE Real widened(int form, const uint8_t *pair, int part, int second) {
    if (form == BF16) {
        Words both = (Words)LOAD(pair + part * LANES * 4);
        return (Real)(second ? both & 0xffff0000u : both << 16);
    }
    const uint8_t *at = pair + (second * PANEL + part * LANES) * number_bytes(form);
    return form == F16 ? HALVES((const uint16_t *)at) : (Real)LOAD(at);
}

INLINE void slice(int form, int panels, int rows, const SliceProduct *product, int row) {
    Real total[ROWS_MOST][2 * PARTS];
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int i = 0; i < panels * PARTS; i++) total[r][i] = REAL_ZERO();
    }
    const float *x = product->x + row * SLICE_STRIDE;
    const uint8_t *first = product->panels[0], *second = product->panels[1];
    for (int pair = 0; pair < (product->depth + 1) / 2; pair++, x += 2) {
        for (int line = 0; line < pair_bytes(form); line += 64) {
            __builtin_prefetch(first + BYTES_AHEAD + line);
            if (panels == 2) __builtin_prefetch(second + BYTES_AHEAD + line);
        }
        UNROLL for (int half = 0; half < 2; half++) {
            Real weights[2 * PARTS];
            UNROLL for (int part = 0; part < PARTS; part++) {
                weights[part] = widened(form, first, part, half);
                if (panels == 2) weights[PARTS + part] = widened(form, second, part, half);
            }
            UNROLL for (int r = 0; r < rows; r++) {
                Real value = REPEAT_REAL(x[r * SLICE_STRIDE + half]);
                UNROLL for (int i = 0; i < panels * PARTS; i++) {
                    total[r][i] = MULTIPLY_ADD(weights[i], value, total[r][i]);
                }
            }
        }
        first += pair_bytes(form);
        if (panels == 2) second += pair_bytes(form);
    }
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int i = 0; i < panels * PARTS; i++) {
            float *sums = product->sums[i / PARTS] + (row + r) * product->sum_stride + i % PARTS * LANES;
            WRITE(sums, product->add ? ADD_REAL(READ(sums), total[r][i]) : total[r][i]);
        }
    }
}

/* As many rows at once as are left: the number is a constant in each branch. */
INLINE void slices(int form, int panels, int most, const SliceProduct *product) {
    for (int row = 0; row < product->rows;) {
        int left = product->rows - row;
        if (most >= 12 && left >= 12) slice(form, panels, 12, product, row), row += 12;
        else if (most >= 8 && left >= 8) slice(form, panels, 8, product, row), row += 8;
        else if (most == 6 && left >= 6) slice(form, panels, 6, product, row), row += 6;
        else if (most >= 4 && left >= 4) slice(form, panels, 4, product, row), row += 4;
        else if (left >= 2) slice(form, panels, 2, product, row), row += 2;
        else slice(form, panels, 1, product, row), row += 1;
    }
}

INLINE void slices_of_form(int form, const SliceProduct *product) {
    if (product->panels[1] && (ROWS_OF_PAIRS == ROWS_MOST || product->rows <= ROWS_OF_PAIRS)) {
        slices(form, 2, ROWS_OF_PAIRS, product);
        return;
    }
    SliceProduct one = *product;
    for (int i = 0; i < 2 && product->panels[i]; i++) {
        one.panels[0] = product->panels[i], one.sums[0] = product->sums[i];
        slices(form, 1, ROWS_MOST, &one);
    }
}
#else
enum { ROWS_MOST = 4 };

INLINE void slices_of_form(int form, const SliceProduct *product) {
    for (int i = 0; i < 2 && product->panels[i]; i++) {
        float total[ROWS_MOST][PANEL] = {{0}};
        for (int k = 0; k < product->depth; k++) {
            float weights[PANEL];
            for (int lane = 0; lane < PANEL; lane++) weights[lane] = number_at(form, product->panels[i], lane, k);
            for (int row = 0; row < product->rows; row++) {
                float value = product->x[row * SLICE_STRIDE + k];
                for (int lane = 0; lane < PANEL; lane++) total[row][lane] += weights[lane] * value;
            }
        }
        for (int row = 0; row < product->rows; row++) {
            float *sums = product->sums[i] + row * product->sum_stride;
            for (int lane = 0; lane < PANEL; lane++) {
                sums[lane] = product->add ? sums[lane] + total[row][lane] : total[row][lane];
            }
        }
    }
}
#endif

static void slices_BF16(const SliceProduct *product) { slices_of_form(BF16, product); }
static void slices_F16(const SliceProduct *product) { slices_of_form(F16, product); }
static void slices_F32(const SliceProduct *product) { slices_of_form(F32, product); }

void multiply_slice(const SliceProduct *product) {
    if (product->form == BF16) slices_BF16(product);
    else if (product->form == F16) slices_F16(product);
    else slices_F32(product);
}

int slice_rows(void) { return ROWS_MOST; }

int hf_widens(void) {
#if defined(LANES)
    return 1;
#else
    return 0;
#endif
}
