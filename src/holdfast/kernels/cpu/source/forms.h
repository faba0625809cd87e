/* How each form of quantised weights is laid out, and access to one element at a time.
 *
 * An element is `(code - centre) * scale`, or `code * scale + minimum` in forms that store minima; a code of a
 * table stands for its entry. Scales of super-blocks are a byte for each group times one number for 256 inputs.
 *
 * A panel is a row of blocks, of a group of 32 inputs or of a super-block of 256. A block is its factors, each for 16
 * outputs, then its codes, group by group: it is read in order, as processors fetch ahead. Codes of a group go in eight runs of four inputs; a run takes four
 * bytes of each of 16 outputs, 64 in all. 8 bits: a run after another. Fewer bits: planes, as the bits of a code
 * demand: of four bits (two runs in 64 bytes: low halves, then high), of two (four runs) and of one (eight runs);
 * a code is its bits in these planes, the lowest ones first. */

#ifndef HOLDFAST_FORMS_H
#define HOLDFAST_FORMS_H

#include "holdfast_cpu.h"

#define INLINE static inline __attribute__((always_inline))

enum {
    RUN_BYTES = 4 * PANEL,
    RUNS = GROUP / 4,
    CENTRE = 32, /* of all forms with 16 inputs a scale: their codes are shifted for it */
};

enum { NO_TABLE, TABLE_E2M1, TABLE_IQ4 };

typedef struct {
    int bits, width, supers, minima, centre, shift, table;
} Rule;

/* Q3_K's codes are multiplied by eight, and its scales divided, so that their centre is that of Q6_K. */
static const Rule RULES[FORMS] = {
    [Q4_0] = {4, 32, 0, 0, 8, 0, NO_TABLE},      [Q4_1] = {4, 32, 0, 1, 0, 0, NO_TABLE},
    [Q5_0] = {5, 32, 0, 0, 16, 0, NO_TABLE},     [Q5_1] = {5, 32, 0, 1, 0, 0, NO_TABLE},
    [Q8_0] = {8, 32, 0, 0, 128, 0, NO_TABLE},    [E2M1] = {4, 32, 0, 0, 12, 0, TABLE_E2M1},
    [IQ4_NL] = {4, 32, 0, 0, 128, 0, TABLE_IQ4}, [Q2_K] = {2, 16, 1, 1, 0, 0, NO_TABLE},
    [Q3_K] = {3, 16, 1, 0, CENTRE, 3, NO_TABLE}, [Q4_K] = {4, 32, 1, 1, 0, 0, NO_TABLE},
    [Q5_K] = {5, 32, 1, 1, 0, 0, NO_TABLE},      [Q6_K] = {6, 16, 1, 0, CENTRE, 0, NO_TABLE},
    [IQ4_XS] = {4, 32, 1, 0, 128, 0, TABLE_IQ4},
};

/* What codes of tables stand for, not negative like all codes: twice each 4-bit float plus 12, and the values of
 * GGUF's IQ4 formats plus 128. */
static const uint8_t TABLES[3][16] = {
    [TABLE_E2M1] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0},
    [TABLE_IQ4] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
};

/* --- sizes --- */

INLINE int groups_of_block(int form) { return RULES[form].supers ? BLOCK_GROUPS : 1; }

INLINE int code_bytes(int form) { return RUN_BYTES * RULES[form].bits; } /* of a group */

/* Scales of one output in a group. */
INLINE int scales_of_group(int form) { return GROUP / RULES[form].width; }

/* A block begins with its factors in half precision: scales, then minima. */
INLINE int half_bytes(int form) { return 2 * PANEL * (RULES[form].minima ? 2 : 1); }

/* Then come, in super-blocks, the bytes of the groups' scales, then of minima. Q2_K has both in one byte: the scale
 * in the low half, the minimum in the high one. */
INLINE int group_minima_at(int form) { return form == Q2_K ? 0 : BLOCK_GROUPS * scales_of_group(form) * PANEL; }

INLINE int codes_at(int form) {
    int bytes = BLOCK_GROUPS * scales_of_group(form) * PANEL;
    if (!RULES[form].supers) return half_bytes(form);
    return half_bytes(form) + bytes + (RULES[form].minima && form != Q2_K ? bytes : 0);
}

INLINE int block_bytes(int form) { return codes_at(form) + groups_of_block(form) * code_bytes(form); }

/* The codes of a group of a block. */
INLINE const uint8_t *codes_of(int form, const uint8_t *block, int group) {
    return block + codes_at(form) + group * code_bytes(form);
}

INLINE size_t panel_bytes(int form, int inputs) {
    return (size_t)block_bytes(form) * (inputs / GROUP / groups_of_block(form));
}

/* --- one element at a time --- */

static inline float from_half(uint16_t half) {
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

/* A code as the products take it: shifted, or the entry of its table. `group` points to the group's codes; `byte` is
 * four times the lane, plus the place in the run. */
INLINE int code_at(int form, const uint8_t *group, int run, int byte) {
    const Rule *rule = &RULES[form];
    int code = 0, place = 0;
    if (rule->bits == 8) return group[run * RUN_BYTES + byte];
    if (rule->bits & 4) {
        code = group[run / 2 * RUN_BYTES + byte] >> run % 2 * 4 & 15;
        group += RUNS / 2 * RUN_BYTES;
        place = 4;
    }
    if (rule->bits & 2) {
        code |= (group[run / 4 * RUN_BYTES + byte] >> run % 4 * 2 & 3) << place;
        group += RUNS / 4 * RUN_BYTES;
        place += 2;
    }
    if (rule->bits & 1) code |= (group[byte] >> run & 1) << place;
    return rule->table ? TABLES[rule->table][code] : code << rule->shift;
}

/* The scale and minimum of one output in one of a group's parts of 16 inputs (or the only one, of 32). */
INLINE void factors_at(int form, const uint8_t *block, int group, int part, int lane, float *scale, float *minimum) {
    const Rule *rule = &RULES[form];
    const uint16_t *halves = (const uint16_t *)block;
    *scale = from_half(halves[lane]);
    *minimum = rule->minima ? from_half(halves[PANEL + lane]) : 0.0f;
    if (rule->supers) {
        const uint8_t *bytes = block + half_bytes(form);
        int at = (group * scales_of_group(form) + part) * PANEL + lane;
        int scale_byte = (int8_t)bytes[at], minimum_byte = bytes[group_minima_at(form) + at];
        if (form == Q2_K) {
            scale_byte &= 15;
            minimum_byte >>= 4;
        }
        *scale = *scale * (form == Q3_K ? 0.125f : 1.0f) * (float)scale_byte;
        *minimum *= (float)minimum_byte;
    }
    if (!rule->minima) *minimum = *scale * -(float)rule->centre;
}

#endif
