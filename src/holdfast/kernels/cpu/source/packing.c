/* Packing of weights into panels, and rows of packed ones (the token embedding). */

#include "floats.h"

#include <string.h>

static uint16_t to_half(float value) {
    union { float value; uint32_t bits; } given = {value};
    uint32_t sign = given.bits >> 16 & 0x8000, magnitude = given.bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) { /* subnormal: adding a power of two rounds to its last place */
        union { float value; uint32_t bits; } shifted = {.bits = magnitude};
        shifted.value += 0.5f;
        return (uint16_t)(sign | (shifted.bits - 0x3f000000));
    }
    uint32_t rounded = magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | rounded >> 13);
}

/* The bytes of a packed part, whose inputs are a multiple of 32, or 256 for super-blocks, if it is quantised. */
int64_t hf_packed_bytes(int form, int outputs, int inputs) {
    return (int64_t)bytes_of_panel(form, inputs) * ((outputs + PANEL - 1) / PANEL);
}

static void put_code(int form, uint8_t *group, int lane, int k, int code) {
    int bits = RULES[form].bits, run = k / 4, byte = lane * 4 + k % 4;
    if (bits == 8) {
        group[run * RUN_BYTES + byte] = (uint8_t)code;
        return;
    }
    if (bits & 4) {
        group[run / 2 * RUN_BYTES + byte] |= (uint8_t)((code & 15) << run % 2 * 4);
        group += RUNS / 2 * RUN_BYTES;
        code >>= 4;
    }
    if (bits & 2) {
        group[run / 4 * RUN_BYTES + byte] |= (uint8_t)((code & 3) << run % 4 * 2);
        group += RUNS / 4 * RUN_BYTES;
        code >>= 2;
    }
    if (bits & 1) group[byte] |= (uint8_t)((code & 1) << run);
}

static void put_factors(const Unpacked *from, uint8_t *block, int output, int index) {
    int form = from->form, lane = output % PANEL, groups = groups_of_block(form);
    size_t at = (size_t)output * (from->inputs / GROUP / groups) + index;
    uint16_t *halves = (uint16_t *)block;
    halves[lane] = to_half(from->scales[at]);
    if (RULES[form].minima) halves[PANEL + lane] = to_half(from->minima[at]);
    if (!RULES[form].supers) return;
    int count = BLOCK_GROUPS * scales_of_group(form);
    uint8_t *bytes = block + half_bytes(form);
    for (int i = 0; i < count; i++) {
        bytes[i * PANEL + lane] = (uint8_t)from->group_scales[at * count + i];
        if (!RULES[form].minima) continue;
        uint8_t minimum = from->group_minima[at * count + i];
        if (form == Q2_K) bytes[i * PANEL + lane] |= (uint8_t)(minimum << 4);
        else bytes[group_minima_at(form) + i * PANEL + lane] = minimum;
    }
}

typedef struct {
    const Unpacked *from;
    uint8_t *blocks;
} Packing;

static void packing_floats(void *context, int panel) {
    const Packing *packing = context;
    const Unpacked *from = packing->from;
    int form = from->form, bytes = number_bytes(form);
    uint8_t *to = packing->blocks + float_panel_bytes(form, from->inputs) * panel;
    memset(to, 0, float_panel_bytes(form, from->inputs));
    for (int lane = 0; lane < PANEL && panel * PANEL + lane < from->outputs; lane++) {
        const uint8_t *numbers = from->codes + (size_t)(panel * PANEL + lane) * from->inputs * bytes;
        for (int k = 0; k < from->inputs; k++) memcpy(to + float_at(form, lane, k), numbers + k * bytes, bytes);
    }
}

static void packing_piece(void *context, int panel) {
    const Packing *packing = context;
    const Unpacked *from = packing->from;
    int form = from->form, groups = groups_of_block(form), blocks = from->inputs / GROUP / groups;
    uint8_t *block = packing->blocks + panel_bytes(form, from->inputs) * panel;
    memset(block, 0, panel_bytes(form, from->inputs));
    for (int index = 0; index < blocks; index++, block += block_bytes(form)) {
        for (int lane = 0; lane < PANEL && panel * PANEL + lane < from->outputs; lane++) {
            int output = panel * PANEL + lane;
            const uint8_t *codes = from->codes + (size_t)output * from->inputs + index * groups * GROUP;
            uint8_t *to = block + codes_at(form);
            for (int group = 0; group < groups; group++, codes += GROUP) {
                for (int k = 0; k < GROUP; k++) put_code(form, to + group * code_bytes(form), lane, k, codes[k]);
            }
            put_factors(from, block, output, index);
        }
    }
}

/* Packs one part of a matrix. */
void hf_pack(const Unpacked *from, uint8_t *blocks) {
    Packing packing = {from, blocks};
    parallel(is_float(from->form) ? packing_floats : packing_piece, &packing, (from->outputs + PANEL - 1) / PANEL);
}

static void unpack_row(int form, const uint8_t *panel, int lane, int inputs, float multiplier, float *out) {
    if (is_float(form)) {
        for (int k = 0; k < inputs; k++) out[k] = number_at(form, panel, lane, k) * multiplier;
        return;
    }
    int groups = groups_of_block(form), width = RULES[form].width, minima = RULES[form].minima;
    for (int index = 0; index < inputs / GROUP / groups; index++, panel += block_bytes(form)) {
        for (int group = 0; group < groups; group++) {
            for (int part = 0; part < GROUP / width; part++) {
                float scale, minimum;
                factors_at(form, panel, group, part, lane, &scale, &minimum);
                for (int k = part * width; k < (part + 1) * width; k++) {
                    int code = code_at(form, codes_of(form, panel, group), k / 4, lane * 4 + k % 4);
                    /* Exact without minima: a whole number times the scale. */
                    float value = minima ? (float)code * scale + minimum : (float)(code - RULES[form].centre) * scale;
                    *out++ = value * multiplier;
                }
            }
        }
    }
}

/* Unpacks some rows of a matrix. Returns 0, or -1 for a row out of range. */
int hf_rows(const Matrix *matrix, const int64_t *rows, int count, float multiplier, float *out) {
    for (int index = 0; index < count; index++) {
        if (rows[index] < 0 || rows[index] >= matrix->outputs) return -1;
    }
    for (int index = 0; index < count; index++, out += matrix->inputs) {
        const MatrixPart *part = matrix->parts;
        int64_t panel = rows[index] / PANEL;
        for (; panel >= part->panels; part++) panel -= part->panels;
        const uint8_t *blocks = part->blocks + bytes_of_panel(part->form, matrix->inputs) * panel;
        unpack_row(part->form, blocks, (int)(rows[index] % PANEL), matrix->inputs, multiplier, out);
    }
    return 0;
}
