/* Causal attention over paged keys and values, read where they lie.
 *
 * A piece of work is one key head and up to 16 query tokens of one row, with all query heads that read that
 * key head. Keys are taken in tiles of 64; each query keeps its running maximum, sum and mix. What a query
 * may not see is never read, or weighs exactly nothing. */

#include "holdfast_cpu.h"

#include <math.h>
#include <string.h>

enum { TILE = 64, QUERY_TOKENS = 16, HEAD_DIM_MAX = 256, QUERIES_MAX = 256, LANE = 16 };

/* 16 floats at any address; the compiler maps them to what the processor has. */
typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));

typedef struct {
    const Attention *rules;
    const Pages *pages;
    const float *keys, *values;
    const float *query;
    float *out;
    int64_t query_stride, out_stride;
    int blocks_of_row; /* pieces of one row and key head at most */
} Work;

/* The state of the softmax of one query. */
typedef struct {
    float peak, sum;
} Running;

static inline float sum_of(Vector v) {
    float total = 0.0f;
    for (int lane = 0; lane < LANE; lane++) total += v[lane];
    return total;
}

/* Scores of one query against up to 64 keys, one dot product each. */
static void score_each(const float *query, const float *const *keys, int count, int dim, float *scores) {
    for (int key = 0; key < count; key++) {
        Vector total = {0};
        for (int d = 0; d < dim; d += LANE) total += *(const Vector *)(query + d) * *(const Vector *)(keys[key] + d);
        scores[key] = sum_of(total);
    }
}

/* The same against keys that stand in columns: [dim, 64]. */
static void score_columns(const float *query, const float *columns, int dim, float *scores) {
    Vector total[TILE / LANE] = {{0}};
    for (int d = 0; d < dim; d++) {
        const float *at = columns + d * TILE;
        for (int part = 0; part < TILE / LANE; part++) {
            total[part] += query[d] * *(const Vector *)(at + part * LANE);
        }
    }
    memcpy(scores, total, sizeof total);
}

/* mix = mix * keep + the weighted values, 64 dimensions at a time. */
static void add_values(float *mix, float keep, const float *weights, const float *const *values, int count,
                       int dim) {
    int d = 0;
    for (; d + 4 * LANE <= dim; d += 4 * LANE) {
        Vector total[4];
        for (int part = 0; part < 4; part++) total[part] = *(const Vector *)(mix + d + part * LANE) * keep;
        for (int key = 0; key < count; key++) {
            for (int part = 0; part < 4; part++) {
                total[part] += weights[key] * *(const Vector *)(values[key] + d + part * LANE);
            }
        }
        for (int part = 0; part < 4; part++) *(Vector *)(mix + d + part * LANE) = total[part];
    }
    for (; d < dim; d += LANE) {
        Vector total = *(const Vector *)(mix + d) * keep;
        for (int key = 0; key < count; key++) total += weights[key] * *(const Vector *)(values[key] + d);
        *(Vector *)(mix + d) = total;
    }
}

/* Takes the scores of keys [low, high) of a tile into one query's softmax and mix. */
static void take_scores(const Work *work, Running *running, float *scores, int low, int high, float *mix,
                        const float *const *values) {
    const Attention *rules = work->rules;
    float peaks[LANE], sums[LANE] = {0}, peak = running->peak, sum = 0.0f;
    for (int key = 0; key < low; key++) scores[key] = -__builtin_inff();
    for (int key = high; key < TILE; key++) scores[key] = -__builtin_inff();
    if (rules->softcap > 0.0f) {
        for (int key = low; key < high; key++) {
            scores[key] = tanhf(scores[key] * rules->scale / rules->softcap) * rules->softcap;
        }
    } else {
        for (int key = 0; key < TILE; key++) scores[key] *= rules->scale;
    }
    for (int lane = 0; lane < LANE; lane++) peaks[lane] = peak;
    for (int key = 0; key < TILE; key += LANE) {
        for (int lane = 0; lane < LANE; lane++) {
            peaks[lane] = peaks[lane] > scores[key + lane] ? peaks[lane] : scores[key + lane];
        }
    }
    for (int lane = 0; lane < LANE; lane++) peak = peaks[lane] > peak ? peaks[lane] : peak;
    float keep = running->peak == -__builtin_inff() ? 0.0f : exponential(running->peak - peak);
    /* A score that is NaN gives a weight that is NaN, and with it the whole result. */
    for (int key = 0; key < TILE; key += LANE) {
        for (int lane = 0; lane < LANE; lane++) {
            scores[key + lane] = exponential(scores[key + lane] - peak);
            sums[lane] += scores[key + lane];
        }
    }
    for (int lane = 0; lane < LANE; lane++) sum += sums[lane];
    running->peak = peak;
    running->sum = running->sum * keep + sum;
    add_values(mix, keep, scores + low, values + low, high - low, rules->head_dim);
}

/* Where the keys and values of tokens [begin, begin + count) of a row lie. */
static void find_tokens(const Work *work, int row, int head, int64_t begin, int count, const float **keys,
                        const float **values) {
    const Pages *pages = work->pages;
    const int32_t *table = pages->table + row * pages->table_stride;
    for (int key = 0; key < count; key++) {
        int64_t token = begin + key, unit = table[token / pages->page_size];
        int64_t at = unit * pages->unit_stride + token % pages->page_size * pages->token_stride;
        keys[key] = work->keys + at + (int64_t)head * work->rules->head_dim;
        values[key] = work->values + at + (int64_t)head * work->rules->head_dim;
    }
}

static void attend_block(const Work *work, int row, int head, int first, int count) {
    const Attention *rules = work->rules;
    int dim = rules->head_dim, shared = rules->heads / rules->kv_heads;
    int64_t position = work->pages->context[row] - (work->pages->row_start[row + 1] - first);
    int64_t end = position + count;
    int64_t begin = rules->window && position + 1 > rules->window ? position + 1 - rules->window : 0;
    Running running[QUERIES_MAX];
    float mixes[QUERIES_MAX * HEAD_DIM_MAX / 4], columns[HEAD_DIM_MAX * TILE], scores[TILE];
    const float *keys[TILE], *values[TILE];
    int by_columns = count * shared >= 6;
    for (int query = 0; query < count * shared; query++) {
        running[query] = (Running){-__builtin_inff(), 0.0f};
        if (rules->sinks) running[query] = (Running){rules->sinks[head * shared + query % shared], 1.0f};
    }
    memset(mixes, 0, sizeof(float) * count * shared * dim);
    for (int64_t tile = begin / TILE * TILE; tile < end; tile += TILE) {
        int lowest = tile < begin ? (int)(begin - tile) : 0;
        int highest = end - tile < TILE ? (int)(end - tile) : TILE;
        find_tokens(work, row, head, tile + lowest, highest - lowest, keys + lowest, values + lowest);
        if (by_columns) {
            for (int key = lowest; key < highest; key++) {
                for (int d = 0; d < dim; d++) columns[d * TILE + key] = keys[key][d];
            }
        }
        for (int query = 0; query < count * shared; query++) {
            int64_t place = position + query / shared;
            int low = lowest, high = place + 1 - tile < highest ? (int)(place + 1 - tile) : highest;
            if (rules->window && place + 1 - rules->window > tile + low) low = (int)(place + 1 - rules->window - tile);
            if (low >= high) continue;
            const float *at = work->query + (first + query / shared) * work->query_stride +
                              (int64_t)(head * shared + query % shared) * dim;
            if (by_columns) score_columns(at, columns, dim, scores);
            else score_each(at, keys + low, high - low, dim, scores + low);
            take_scores(work, &running[query], scores, low, high, mixes + query * dim, values);
        }
    }
    for (int query = 0; query < count * shared; query++) {
        float *to = work->out + (first + query / shared) * work->out_stride +
                    (int64_t)(head * shared + query % shared) * dim;
        float share = 1.0f / running[query].sum;
        for (int d = 0; d < dim; d++) to[d] = mixes[query * dim + d] * share;
    }
}

/* Query tokens of one piece: what fits into its buffers. */
static int tokens_at_once(const Attention *rules) {
    int shared = rules->heads / rules->kv_heads;
    int most = QUERIES_MAX * HEAD_DIM_MAX / 4 / rules->head_dim / shared;
    if (most > QUERIES_MAX / shared) most = QUERIES_MAX / shared;
    return most < 1 ? 1 : most < QUERY_TOKENS ? most : QUERY_TOKENS;
}

static void attention_piece(void *context, int piece) {
    const Work *work = context;
    int heads = work->rules->kv_heads, at_once = tokens_at_once(work->rules);
    int row = piece / heads / work->blocks_of_row, block = piece / heads % work->blocks_of_row;
    int first = work->pages->row_start[row] + block * at_once, end = work->pages->row_start[row + 1];
    if (first >= end) return;
    attend_block(work, row, piece % heads, first, end - first < at_once ? end - first : at_once);
}

/* Attention of one layer for query [tokens, heads * head_dim]. */
void attend(const Attention *rules, const Pages *pages, int layer, const float *query, int64_t query_stride,
            float *out, int64_t out_stride) {
    int longest = 0;
    for (int row = 0; row < pages->rows; row++) {
        int count = pages->row_start[row + 1] - pages->row_start[row];
        longest = count > longest ? count : longest;
    }
    int at_once = tokens_at_once(rules), blocks = (longest + at_once - 1) / at_once;
    int64_t offset = layer * pages->layer_stride;
    Work work = {rules, pages, pages->keys + offset, pages->values + offset, query, out,
                 query_stride, out_stride, blocks};
    parallel(attention_piece, &work, pages->rows * blocks * rules->kv_heads);
}

void hf_attend(const Attention *rules, const Pages *pages, const float *query, int64_t query_stride,
               float *out, int64_t out_stride) {
    attend(rules, pages, 0, query, query_stride, out, out_stride);
}
