/* Products of activations with matrices.
 *
 * Quantised weights are multiplied with 8-bit activations. Products within a group of 32 (or 16) are integers, and
 * groups are added in order: a row's result does not depend on the rest of the batch, nor on the number of threads. The inner loop takes 16 or 8 outputs at a time on x86,
 * four on ARM, and is plain C elsewhere; it unpacks the codes of a group for up to eight rows. */

#include "floats.h"
#include "lanes.h"

#include <stdlib.h>

/* Loops over the rows of a work item are unrolled, so that their sums stay in registers; those over parts of a
 * panel are not, so that there is less to compile. */
#define UNROLL _Pragma("GCC unroll 8")
#define ROLLED _Pragma("GCC unroll 1")

enum {
    ROWS_AT_ONCE = 8,
    BYTES_AHEAD = 4096, /* how far ahead of its use a weight is fetched */
    TILE_PANELS = 8,    /* panels and rows at once of a product with floats */
    TILE_ROWS = 96,
    ROWS_OF_PAIR_TILES = 32, /* up to as many rows, tiles are two panels */
};

/* --- the inner loops: LANES of 16 outputs, which are part `part` of them --- */

#if defined(LANES)
INLINE void load_codes(int form, const uint8_t *group, int part, Whole codes[RUNS]) {
    int bits = RULES[form].bits, shift = RULES[form].shift;
    const uint8_t *fours = group + part * LANES * 4;
    const uint8_t *pairs = fours + (bits & 4 ? RUNS / 2 * RUN_BYTES : 0);
    const uint8_t *ones = pairs + (bits & 2 ? RUNS / 4 * RUN_BYTES : 0);
    int pair_place = (bits & 4 ? 4 : 0) + shift, one_place = pair_place + (bits & 2 ? 2 : 0);
    UNROLL for (int run = 0; run < RUNS; run++) {
        if (bits == 8) {
            codes[run] = LOAD(fours + run * RUN_BYTES);
            continue;
        }
        if (bits & 4) {
            Whole both = LOAD(fours + run / 2 * RUN_BYTES);
            codes[run] = run % 2 ? HIGH_HALVES(both) : LOW_HALVES(both);
        }
        if (bits & 2) {
            Whole moved = shifted(LOAD(pairs + run / 4 * RUN_BYTES), pair_place - run % 4 * 2);
            codes[run] = bits & 4 ? OR_MASKED(codes[run], moved, 3 << pair_place) : masked(moved, 3 << pair_place);
        }
        if (bits & 1) codes[run] = OR_MASKED(codes[run], shifted(LOAD(ones), one_place - run), 1 << one_place);
        if (RULES[form].table) codes[run] = LOOK_UP(codes[run], TABLES[RULES[form].table]);
    }
}

/* The factors of a group, from those of its block. */
INLINE void load_factors(int form, const uint8_t *block, int group, int part, Real block_scale, Real block_minimum,
                         Real scale[2], Real minimum[2]) {
    for (int half = 0; half < GROUP / RULES[form].width; half++) {
        scale[half] = block_scale;
        if (RULES[form].minima) minimum[half] = block_minimum;
        if (RULES[form].supers) {
            int at = (group * scales_of_group(form) + half) * PANEL + part * LANES;
            const uint8_t *bytes = block + half_bytes(form) + at;
            Whole scales = SIGNED_BYTES(bytes), minima = scales;
            if (form == Q2_K) {
                minima = bits_of_words(scales, 4, 15);
                scales = bits_of_words(scales, 0, 15);
            } else if (RULES[form].minima) {
                minima = SIGNED_BYTES(bytes + group_minima_at(form));
            }
            scale[half] = MULTIPLY(block_scale, TO_REAL(scales));
            if (RULES[form].minima) minimum[half] = MULTIPLY(block_minimum, TO_REAL(minima));
        }
        if (!RULES[form].minima) minimum[half] = MULTIPLY(scale[half], REPEAT_REAL(-(float)RULES[form].centre));
    }
}

INLINE void load_halves(int form, const uint8_t *block, int part, Real *scale, Real *minimum) {
    const uint16_t *halves = (const uint16_t *)block + part * LANES;
    *scale = HALVES(halves);
    if (form == Q3_K) *scale = MULTIPLY(*scale, REPEAT_REAL(0.125f));
    *minimum = RULES[form].minima ? HALVES(halves + PANEL) : REAL_ZERO();
}

/* Adds a group's products with `count` rows to their totals. */
INLINE void add_group(int form, const Whole codes[RUNS], const Real scale[2], const Real minimum[2],
                      const Activations *x, int row, int count, int group, Real total[]) {
    int groups = x->inputs / GROUP, minima = RULES[form].minima;
    int wide = RULES[form].bits == 8 || RULES[form].table == TABLE_IQ4; /* codes of 8 bits */
    UNROLL for (int r = 0; r < count; r++) {
        size_t at = (size_t)(row + r) * groups + group;
        const int8_t *q = x->codes + at * GROUP;
        if (RULES[form].width == GROUP) {
            Whole sum = ZERO();
            UNROLL for (int run = 0; run < RUNS; run++) {
                sum = FOUR_PRODUCTS(sum, codes[run], REPEAT(q + run * 4), wide);
            }
            Real scaled = MULTIPLY(TO_REAL(sum), scale[0]);
            total[r] = MULTIPLY_ADD(scaled, REPEAT_REAL(x->scales[at]), total[r]);
            total[r] = MULTIPLY_ADD(minimum[0], REPEAT_REAL(x->sums[at]), total[r]);
            continue;
        }
        Whole first = ZERO(), second = first;
        if (!minima) {
            first = REPEAT(x->offsets + 2 * at);
            second = REPEAT(x->offsets + 2 * at + 1);
        }
        UNROLL for (int run = 0; run < RUNS / 2; run++) {
            first = FOUR_PRODUCTS(first, codes[run], REPEAT(q + run * 4), 0);
            second = FOUR_PRODUCTS(second, codes[RUNS / 2 + run], REPEAT(q + GROUP / 2 + run * 4), 0);
        }
        Real scaled = MULTIPLY_ADD(TO_REAL(second), scale[1], MULTIPLY(TO_REAL(first), scale[0]));
        total[r] = MULTIPLY_ADD(scaled, REPEAT_REAL(x->scales[at]), total[r]);
        if (minima) {
            total[r] = MULTIPLY_ADD(minimum[0], REPEAT_REAL(x->half_sums[2 * at]), total[r]);
            total[r] = MULTIPLY_ADD(minimum[1], REPEAT_REAL(x->half_sums[2 * at + 1]), total[r]);
        }
    }
}

/* The products of a whole panel with `count` rows. */
INLINE void panel_part(int form, const uint8_t *block, const Activations *x, int row, int count, int part,
                       float out[][PANEL]) {
    Real total[ROWS_AT_ONCE];
    UNROLL for (int r = 0; r < count; r++) total[r] = REAL_ZERO();
    int at_once = groups_of_block(form), bytes = block_bytes(form) / at_once;
    for (int first = 0; first < x->inputs / GROUP; first += at_once, block += block_bytes(form)) {
        Real block_scale, block_minimum;
        load_halves(form, block, part, &block_scale, &block_minimum);
        for (int group = 0; group < at_once; group++) {
            const uint8_t *ahead = block + group * bytes + BYTES_AHEAD;
            for (int line = 0; line < bytes; line += 64) __builtin_prefetch(ahead + line);
            Whole codes[RUNS];
            Real scale[2], minimum[2];
            load_codes(form, codes_of(form, block, group), part, codes);
            load_factors(form, block, group, part, block_scale, block_minimum, scale, minimum);
            add_group(form, codes, scale, minimum, x, row, count, first + group, total);
        }
    }
    UNROLL for (int r = 0; r < count; r++) WRITE(out[r] + part * LANES, total[r]);
}

INLINE void panel_rows(int form, const uint8_t *block, const Activations *x, int row, int count,
                       float out[][PANEL]) {
    ROLLED for (int part = 0; part < PANEL / LANES; part++) panel_part(form, block, x, row, count, part, out);
}
#else
/* A group as all forms have it; factors of the second 16 inputs only where they have their own. */
typedef struct {
    uint8_t codes[RUNS][RUN_BYTES];
    float scale[2][PANEL], minimum[2][PANEL];
} Group;

INLINE void unpack(int form, const uint8_t *block, int group, Group *to) {
    const uint8_t *codes = codes_of(form, block, group);
    UNROLL for (int run = 0; run < RUNS; run++) {
        for (int byte = 0; byte < RUN_BYTES; byte++) to->codes[run][byte] = (uint8_t)code_at(form, codes, run, byte);
    }
    for (int lane = 0; lane < PANEL; lane++) {
        for (int half = 0; half < GROUP / RULES[form].width; half++) {
            factors_at(form, block, group, half, lane, &to->scale[half][lane], &to->minimum[half][lane]);
        }
    }
}

/* Adds a group's products with one row. */
static void add_group(const Group *group, int width, int minima, const Activations *x, size_t at, float out[PANEL]) {
    for (int first = 0; first < GROUP; first += width) {
        int half = first / width, whole = width == GROUP;
        const int8_t *q = x->codes + at * GROUP + first;
        float scale_of_x = x->scales[at], sum_of_x = whole ? x->sums[at] : x->half_sums[2 * at + half];
        int32_t sums[PANEL], offset = whole || minima ? 0 : x->offsets[2 * at + half];
        for (int lane = 0; lane < PANEL; lane++) sums[lane] = offset;
        for (int k = 0; k < width; k += 4) {
            const uint8_t *codes = group->codes[(first + k) / 4];
            for (int lane = 0; lane < PANEL; lane++) {
                for (int i = 0; i < 4; i++) sums[lane] += codes[lane * 4 + i] * q[k + i];
            }
        }
        for (int lane = 0; lane < PANEL; lane++) {
            /* One product at a time: of a sum of two, compilers fuse now one and now the other. */
            out[lane] += (float)sums[lane] * group->scale[half][lane] * scale_of_x;
            if (whole || minima) out[lane] += group->minimum[half][lane] * sum_of_x;
        }
    }
}

INLINE void panel_rows(int form, const uint8_t *block, const Activations *x, int row, int count,
                       float out[][PANEL]) {
    int at_once = groups_of_block(form), groups = x->inputs / GROUP;
    memset(out, 0, sizeof(float) * PANEL * count);
    for (int index = 0; index < groups; index++) {
        Group group;
        unpack(form, block, index % at_once, &group);
        for (int r = 0; r < count; r++) {
            size_t at = (size_t)(row + r) * groups + index;
            add_group(&group, RULES[form].width, RULES[form].minima, x, at, out[r]);
        }
        if (index % at_once == at_once - 1) block += block_bytes(form);
    }
}
#endif

/* --- panels: the form is a constant in each function, and with vectors the number of rows in each branch --- */

typedef void Rows(const uint8_t *blocks, const Activations *x, int row, int count, float out[][PANEL]);

#if defined(LANES)
#define DEFINE_FORM(form)                                                                                \
    static void rows_##form(const uint8_t *blocks, const Activations *x, int row, int count,             \
                            float out[][PANEL]) {                                                        \
        while (count > 0) {                                                                              \
            int done = count >= 8 ? 8 : count >= 4 ? 4 : count >= 2 ? 2 : 1;                             \
            if (done == 8) panel_rows(form, blocks, x, row, 8, out);                                     \
            else if (done == 4) panel_rows(form, blocks, x, row, 4, out);                                \
            else if (done == 2) panel_rows(form, blocks, x, row, 2, out);                                \
            else panel_rows(form, blocks, x, row, 1, out);                                               \
            row += done, count -= done, out += done;                                                     \
        }                                                                                                \
    }
#else
#define DEFINE_FORM(form)                                                                                \
    static void rows_##form(const uint8_t *blocks, const Activations *x, int row, int count,             \
                            float out[][PANEL]) {                                                        \
        panel_rows(form, blocks, x, row, count, out);                                                    \
    }
#endif

DEFINE_FORM(Q4_0)
DEFINE_FORM(Q4_1)
DEFINE_FORM(Q5_0)
DEFINE_FORM(Q5_1)
DEFINE_FORM(Q8_0)
DEFINE_FORM(E2M1)
DEFINE_FORM(IQ4_NL)
DEFINE_FORM(Q2_K)
DEFINE_FORM(Q3_K)
DEFINE_FORM(Q4_K)
DEFINE_FORM(Q5_K)
DEFINE_FORM(Q6_K)
DEFINE_FORM(IQ4_XS)

static Rows *const ROWS[FORMS] = {
    [Q4_0] = rows_Q4_0, [Q4_1] = rows_Q4_1, [Q5_0] = rows_Q5_0,     [Q5_1] = rows_Q5_1, [Q8_0] = rows_Q8_0,
    [E2M1] = rows_E2M1, [Q2_K] = rows_Q2_K, [Q3_K] = rows_Q3_K,     [Q4_K] = rows_Q4_K, [Q5_K] = rows_Q5_K,
    [Q6_K] = rows_Q6_K, [IQ4_NL] = rows_IQ4_NL, [IQ4_XS] = rows_IQ4_XS,
};

/* A panel of a matrix, and its form. */
static const uint8_t *find_panel(const Matrix *matrix, int index, int *form) {
    const MatrixPart *part = matrix->parts;
    for (; index >= part->panels; part++) index -= part->panels;
    *form = part->form;
    return part->blocks + bytes_of_panel(part->form, matrix->inputs) * (size_t)index;
}

/* 16 outputs of up to eight rows. */
static void panel(const Matrix *matrix, int index, const Activations *x, int row, int count, float out[][PANEL]) {
    int form;
    const uint8_t *blocks = find_panel(matrix, index, &form);
    ROWS[form](blocks, x, row, count, out);
}

/* The kinds of activations that a matrix is multiplied with. */
int kinds_of(const Matrix *matrix) {
    int kinds = 0;
    for (int i = 0; i < matrix->part_count; i++) kinds |= is_float(matrix->parts[i].form) ? FLOATS : EIGHT_BITS;
    return kinds;
}

/* --- whole products --- */

typedef struct {
    const Matrix *matrix;
    const Activations *x;
    float *out;
    int64_t out_stride;
    Finish finish;
    float multiplier;
    int panels, panels_at_once, panels_of_tile;
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

/* --- tiles: some rows by some panels, of which some at least are not quantised --- */

typedef struct {
    const uint8_t *blocks[TILE_PANELS];
    int forms[TILE_PANELS];
    int count, row, rows;
} Tile;

static void quantised_panel(const Product *product, const Tile *tile, int i, float *sums) {
    float out[ROWS_AT_ONCE][PANEL];
    for (int row = 0; row < tile->rows; row += ROWS_AT_ONCE) {
        int left = tile->rows - row, count = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
        ROWS[tile->forms[i]](tile->blocks[i], product->x, tile->row + row, count, out);
        for (int r = 0; r < count; r++) {
            memcpy(sums + ((row + r) * tile->count + i) * PANEL, out[r], sizeof out[r]);
        }
    }
}

/* Sums of a tile [rows, panels]. Slice by slice, and in it two panels with all rows: their weights stay in the first
 * cache, the activations in the second. */
static void sum_tile(const Product *product, const Tile *tile, float *sums) {
    const Activations *x = product->x;
    int at_once = slice_rows();
    for (int i = 0; i < tile->count; i++) {
        if (!is_float(tile->forms[i])) quantised_panel(product, tile, i, sums);
    }
    for (int slice = 0; slice < slices_of(x->inputs); slice++) {
        for (int i = 0, both = 0; i < tile->count; i += 1 + both) {
            int form = tile->forms[i];
            both = i + 1 < tile->count && tile->forms[i + 1] == form;
            for (int row = 0; is_float(form) && row < tile->rows; row += at_once) {
                int left = tile->rows - row;
                size_t begin = (size_t)slice * (SLICE / 2) * pair_bytes(form);
                float *out = sums + (row * tile->count + i) * PANEL;
                multiply_slice(&(SliceProduct){
                    .form = form,
                    .depth = depth_of(x->inputs, slice),
                    .panels = {tile->blocks[i] + begin, both ? tile->blocks[i + 1] + begin : NULL},
                    .x = x->floats + ((size_t)slice * x->rows + tile->row + row) * SLICE_STRIDE,
                    .sums = {out, out + PANEL},
                    .sum_stride = tile->count * PANEL,
                    .rows = left < at_once ? left : at_once,
                    .add = slice > 0,
                });
            }
        }
    }
}

/* Panels `first` to `end` of the outputs; SWIGLU takes as many of the second half of the matrix, too. */
static void run_tile(const Product *product, int first, int end, int row, int rows) {
    float sums[TILE_ROWS * TILE_PANELS * PANEL] __attribute__((aligned(64)));
    int count = end - first, gated = product->finish == SWIGLU;
    Tile tile = {.count = gated ? 2 * count : count, .row = row, .rows = rows};
    for (int i = 0; i < tile.count; i++) {
        int index = i < count ? first + i : product->panels + first + i - count;
        tile.blocks[i] = find_panel(product->matrix, index, &tile.forms[i]);
    }
    sum_tile(product, &tile, sums);
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < count; i++) {
            float *at = sums + (r * tile.count + i) * PANEL;
            finish_panel(product, first + i, row + r, at, gated ? at + count * PANEL : NULL);
        }
    }
}

static void tiles_piece(void *context, int piece) {
    const Product *product = context;
    int groups = (product->panels + product->panels_at_once - 1) / product->panels_at_once;
    int first = piece % groups * product->panels_at_once, end = first + product->panels_at_once;
    int row = piece / groups * TILE_ROWS, left = product->x->rows - row;
    if (end > product->panels) end = product->panels;
    for (; first < end; first += product->panels_of_tile) {
        int last = first + product->panels_of_tile < end ? first + product->panels_of_tile : end;
        run_tile(product, first, last, row, left < TILE_ROWS ? left : TILE_ROWS);
    }
}

/* A few rows stay in the second cache, so two panels are read to their end, in order. */
static void multiply_floats(Product *product) {
    int rows = product->x->rows, halves = product->finish == SWIGLU ? 2 : 1;
    int few = rows <= ROWS_OF_PAIR_TILES;
    product->panels_of_tile = (few ? 2 : TILE_PANELS) / halves;
    int at_once = product->panels_at_once / product->panels_of_tile;
    product->panels_at_once = (at_once ? at_once : 1) * product->panels_of_tile;
    int groups = (product->panels + product->panels_at_once - 1) / product->panels_at_once;
    parallel(tiles_piece, product, groups * ((rows + TILE_ROWS - 1) / TILE_ROWS));
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
    Product product = {matrix, x, out, out_stride, finish, multiplier, panels, at_once, 0};
    if (x->floats && kinds_of(matrix) & FLOATS) multiply_floats(&product);
    else parallel(product_piece, &product, (panels + at_once - 1) / at_once);
}

typedef struct {
    Activations to;
    const float *x;
    int64_t stride;
    int kinds;
} Rounding;

static void rounding_piece(void *context, int piece) {
    Rounding *rounding = context;
    int end = (piece + 1) * ROWS_AT_ONCE < rounding->to.rows ? (piece + 1) * ROWS_AT_ONCE : rounding->to.rows;
    for (int row = piece * ROWS_AT_ONCE; row < end; row++) {
        put_row(&rounding->to, row, rounding->x + row * rounding->stride, rounding->kinds);
    }
}

/* One product on its own: x [rows, inputs] in floats. Returns 0, or -1 if out of memory. */
int hf_linear(const Matrix *matrix, const float *x, int64_t x_stride, int rows, float *out,
              int64_t out_stride) {
    int kinds = kinds_of(matrix);
    void *memory = aligned_alloc(64, activation_bytes(rows, matrix->inputs, kinds));
    if (!memory) return -1;
    Rounding rounding = {activations_in(memory, rows, matrix->inputs, kinds), x, x_stride, kinds};
    parallel(rounding_piece, &rounding, (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE);
    multiply(matrix, &rounding.to, out, out_stride, STORE, 1.0f);
    free(memory);
    return 0;
}
