/* Causal attention over paged keys and values, read in place.
 *
 * A work item is one key head and up to 16 query tokens of one row, with all query heads that share that key
 * head. Keys are processed in tiles of 64 with a running softmax per query. Masked keys are not read, or have
 * a weight of exactly zero. */

#include "holdfast_cpu.h"

#include <math.h>
#include <string.h>

enum { TILE = 64, QUERY_TOKENS = 16, HEAD_DIM_MAX = 256, QUERIES_MAX = 256, LANE = 16 };

/* A vector of 16 unaligned floats; the compiler maps it to the processor's vectors. */
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

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 4")

#if defined(__AVX512F__) && defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 12)
/* Lanes of `a` and `b` change places where their numbers differ by `far`: one stage of a transposition. */
#define FIRST(far, l) ((l) & (far) ? 16 + (l) - (far) : (l))
#define SECOND(far, l) ((l) & (far) ? 16 + (l) : (l) + (far))
#define LANES_OF(which, far)                                                                             \
    which(far, 0), which(far, 1), which(far, 2), which(far, 3), which(far, 4), which(far, 5), which(far, 6), \
    which(far, 7), which(far, 8), which(far, 9), which(far, 10), which(far, 11), which(far, 12),         \
    which(far, 13), which(far, 14), which(far, 15)
#define STAGE(far)                                                                                       \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANE; i++) {                                            \
        if (i & (far)) continue;                                                                         \
        Vector a = block[i], b = block[i + (far)];                                                       \
        block[i] = __builtin_shufflevector(a, b, LANES_OF(FIRST, far));                                  \
        block[i + (far)] = __builtin_shufflevector(a, b, LANES_OF(SECOND, far));                         \
    }

/* 16 dimensions of 16 keys into columns. */
INLINE void turn_block(const float *const *keys, int d, float *columns) {
    Vector block[LANE];
    _Pragma("GCC unroll 16") for (int i = 0; i < LANE; i++) block[i] = *(const Vector *)(keys[i] + d);
    STAGE(8)
    STAGE(4)
    STAGE(2)
    STAGE(1)
    _Pragma("GCC unroll 16") for (int i = 0; i < LANE; i++) *(Vector *)(columns + (d + i) * TILE) = block[i];
}
#else
INLINE void turn_block(const float *const *keys, int d, float *columns) {
    for (int i = 0; i < LANE; i++) {
        for (int key = 0; key < LANE; key++) columns[(d + i) * TILE + key] = keys[key][d + i];
    }
}
#endif

/* The keys of a tile in columns [dim, 64]. Scores are always made from these, in one order of additions: a
 * query's result does not depend on the queries beside it. */
static void turn_keys(const float *const *keys, int dim, float *columns) {
    for (int first = 0; first < TILE; first += LANE) {
        for (int d = 0; d < dim; d += LANE) turn_block(keys + first, d, columns + first);
    }
}

/* Scores of `count` queries against 64 keys that stand in columns [dim, 64]. */
INLINE void score_columns(const float *const *queries, int count, const float *columns, int dim,
                          float scores[][TILE]) {
    Vector total[4][TILE / LANE] = {{{0}}};
    for (int d = 0; d < dim; d++) {
        const float *at = columns + d * TILE;
        UNROLL for (int query = 0; query < count; query++) {
            UNROLL for (int part = 0; part < TILE / LANE; part++) {
                total[query][part] += queries[query][d] * *(const Vector *)(at + part * LANE);
            }
        }
    }
    UNROLL for (int query = 0; query < count; query++) memcpy(scores[query], total[query], sizeof total[query]);
}

/* mix = mix * keep + the weighted values, for `count` queries and 64 dimensions. */
INLINE void add_values(float *const *mixes, const float *keep, int count, float weights[][TILE],
                       const float *const *values, int low, int high, int parts) {
    Vector total[4][4];
    UNROLL for (int query = 0; query < count; query++) {
        UNROLL for (int part = 0; part < parts; part++) {
            total[query][part] = *(const Vector *)(mixes[query] + part * LANE) * keep[query];
        }
    }
    for (int key = low; key < high; key++) {
        UNROLL for (int query = 0; query < count; query++) {
            UNROLL for (int part = 0; part < parts; part++) {
                total[query][part] += weights[query][key] * *(const Vector *)(values[key] + part * LANE);
            }
        }
    }
    UNROLL for (int query = 0; query < count; query++) {
        UNROLL for (int part = 0; part < parts; part++) {
            *(Vector *)(mixes[query] + part * LANE) = total[query][part];
        }
    }
}

/* The same for all dimensions: 64 at a time, then 16. */
INLINE void add_all_values(float *const *mixes, const float *keep, int count, float weights[][TILE],
                           const float *const *values, int low, int high, int dim) {
    const float *shifted[TILE];
    float *places[4];
    for (int d = 0; d < dim; d += dim - d >= 4 * LANE ? 4 * LANE : LANE) {
        for (int key = low; key < high; key++) shifted[key] = values[key] + d;
        for (int query = 0; query < count; query++) places[query] = mixes[query] + d;
        if (dim - d >= 4 * LANE) add_values(places, keep, count, weights, shifted, low, high, 4);
        else add_values(places, keep, count, weights, shifted, low, high, 1);
    }
}

/* Turns the scores of keys [low, high) of a tile into weights, all others into zero, and takes them into a
 * query's softmax. Returns the factor that rescales the accumulated mix. */
static float take_scores(const Attention *rules, Running *running, float *scores, int low, int high) {
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
    return keep;
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

/* One tile of keys of one row and key head. */
typedef struct {
    const float *keys[TILE], *values[TILE];
    float columns[HEAD_DIM_MAX * TILE];
    int64_t first;       /* the token that key 0 would be */
    int lowest, highest; /* keys that are there */
} Tile;

/* Up to four queries of a piece, from number `query` on, look at a tile. */
INLINE void look(const Work *work, const Tile *tile, int query, int count, int64_t position,
                 const float *const *queries, Running *running, float *mixes) {
    const Attention *rules = work->rules;
    int dim = rules->head_dim, shared = rules->heads / rules->kv_heads;
    float scores[4][TILE], keep[4], *places[4];
    score_columns(queries + query, count, tile->columns, dim, scores);
    for (int q = 0; q < count; q++) {
        int64_t place = position + (query + q) / shared - tile->first; /* the last key that it may see */
        int low = tile->lowest, high = place + 1 < tile->highest ? (int)(place + 1) : tile->highest;
        if (rules->window && place + 1 - rules->window > low) low = (int)(place + 1 - rules->window);
        places[q] = mixes + (query + q) * dim;
        if (low < high) {
            keep[q] = take_scores(rules, &running[query + q], scores[q], low, high);
        } else {
            memset(scores[q], 0, sizeof scores[q]);
            keep[q] = 1.0f;
        }
    }
    add_all_values(places, keep, count, scores, tile->values, tile->lowest, tile->highest, dim);
}

static void attend_block(const Work *work, int row, int head, int first, int count) {
    const Attention *rules = work->rules;
    int dim = rules->head_dim, shared = rules->heads / rules->kv_heads, all = count * shared;
    int64_t position = work->pages->context[row] - (work->pages->row_start[row + 1] - first);
    int64_t end = position + count;
    int64_t begin = rules->window && position + 1 > rules->window ? position + 1 - rules->window : 0;
    Running running[QUERIES_MAX];
    float mixes[QUERIES_MAX * HEAD_DIM_MAX / 4];
    const float *queries[QUERIES_MAX];
    static const float nothing[HEAD_DIM_MAX];
    Tile tile;
    for (int query = 0; query < all; query++) {
        int of = head * shared + query % shared;
        queries[query] = work->query + (first + query / shared) * work->query_stride + (int64_t)of * dim;
        running[query] = rules->sinks ? (Running){rules->sinks[of], 1.0f} : (Running){-__builtin_inff(), 0.0f};
    }
    memset(mixes, 0, sizeof(float) * all * dim);
    for (tile.first = begin / TILE * TILE; tile.first < end; tile.first += TILE) {
        int low = tile.first < begin ? (int)(begin - tile.first) : 0;
        int high = end - tile.first < TILE ? (int)(end - tile.first) : TILE, query = 0;
        tile.lowest = low, tile.highest = high;
        find_tokens(work, row, head, tile.first + low, high - low, tile.keys + low, tile.values + low);
        for (int key = 0; key < low; key++) tile.keys[key] = nothing;
        for (int key = high; key < TILE; key++) tile.keys[key] = nothing;
        turn_keys(tile.keys, dim, tile.columns);
        for (; query + 4 <= all; query += 4) {
            look(work, &tile, query, 4, position, queries, running, mixes);
        }
        for (; query < all; query++) look(work, &tile, query, 1, position, queries, running, mixes);
    }
    for (int query = 0; query < all; query++) {
        int of = head * shared + query % shared;
        float *to = work->out + (first + query / shared) * work->out_stride + (int64_t)of * dim;
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
