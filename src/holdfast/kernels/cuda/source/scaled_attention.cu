// Split-K attention of one-token rows over paged keys and values in eight bits, on Hopper, bound by reading them.
//
// As `attention.cu` does for narrow pieces: a `PieceQueue` lists keys of rows, persistent programs take pieces in turn,
// one producer thread has the copy engine load codes and scales into a ring of STAGES stages, and two warp groups
// take turns with the pieces. Keys are the rows of a matrix and the query heads that share them its columns; each warp
// has 16 keys of a block of 64, and the four warps of a group reduce at the end of a piece.
//
// A number is an e4m3 code times the power of two of its token and head (`ScaledCache`), which is exact in float16. Two
// codes are decoded by one instruction. Scales of keys multiply scores; scales of values multiply values. Queries are
// divided by a power of two of their row, so that they are exact in float16 whatever their range.
//
// The matrix instructions want neighbouring numbers in one register. Four neighbouring codes of a key are two such
// pairs, if the columns of keys and queries are permuted alike. Values are wanted in pairs of keys: a transposing load
// of 16-bit elements brings two columns of two keys, and a byte permutation sorts them by column.
//
// `scaled_attention.py` compiles this file with DIM, GROUP, KV_HEADS, PAGE and STAGES defined, after `hopper.cu` and
// `queue.cu`.

constexpr int CHUNKS = DIM / 16;
// Bytes of a key's codes, of a block's keys or values, of both, of their scales, and of a group's reduction.
constexpr u32 LINE = DIM, BLOCK = KEYS * LINE, PLACE = 2 * BLOCK, SCALES = 2 * KEYS;
constexpr u32 SUMS = 4 * NARROW * PITCH * 4;

static_assert(DIM == 64 || DIM == 128, "a line is as wide as its swizzle");
static_assert(GROUP <= NARROW, "the heads of one token are columns of one matrix");

// FETCHED or KEYS keys, or values, of one head into a place of the ring.
__device__ __forceinline__ void fetch(u32 to, const TensorMap* map, int token, int head, int unit, u32 barrier,
                                      u64 mark) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to), "l"(map), "r"(0), "r"(token), "r"(head), "r"(unit),
        "r"(barrier), "l"(mark)
        : "memory");
}

// Scales of FETCHED or KEYS keys.
__device__ __forceinline__ void fetch_scales(u32 to, const unsigned char* from, int count, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(count), "r"(barrier)
                 : "memory");
}

// The power of two whose biased exponent lies at an address in shared memory.
__device__ __forceinline__ float scale_at(u32 address) {
    u32 exponent;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(exponent) : "r"(address) : "memory");
    return __uint_as_float(exponent << 23);
}

__device__ __forceinline__ u32 half_pair(float first, float second) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// Four codes as two pairs of float16.
__device__ __forceinline__ void decode(u32 codes, u32& low, u32& high) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
}

__device__ __forceinline__ u32 times(u32 pair, u32 factors) {
    u32 result;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(factors));
    return result;
}

// An instruction of a warp: sums[16 x 8] += a[16 x 16] b[16 x 8].
__device__ __forceinline__ void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The queries of a piece as columns of a matrix: a thread has column lane / 4, and of every 16 rows the four from
// lane % 4 * 4 on. `unit` turns the scores of columns lane % 4 * 2 and the next one into units of log 2.
struct Queries {
    u32 pairs[2 * CHUNKS];
    float unit[2];

    __device__ __forceinline__ void read(const u16* token, float unit_score, int lane) {
        const u16* mine = token + lane / 4 * DIM + lane % 4 * 4;
        uint2 given[CHUNKS];
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            given[i] = lane / 4 < GROUP ? *(const uint2*)(mine + i * 16) : make_uint2(0, 0);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const u32 two = j ? given[i].y : given[i].x;
                largest = fmaxf(largest, fabsf(__uint_as_float(two << 16)));
                largest = fmaxf(largest, fabsf(__uint_as_float(two & 0xFFFF0000u)));
            }
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
        const u32 exponent = min(max(__float_as_uint(largest) >> 23, 1u), 253u);
        const float inverse = __uint_as_float((254 - exponent) << 23), factor = __uint_as_float(exponent << 23);
#pragma unroll
        for (int i = 0; i < 2 * CHUNKS; i++) {
            const u32 two = i % 2 ? given[i / 2].y : given[i / 2].x;
            pairs[i] = half_pair(__uint_as_float(two << 16) * inverse, __uint_as_float(two & 0xFFFF0000u) * inverse);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) unit[i] = unit_score * __shfl_sync(0xFFFFFFFF, factor, (lane % 4 * 2 + i) * 4);
    }
};

// The running softmax of a piece's rows over the keys of one warp. A thread has rows `lane % 4 * 2` and the next one,
// and of every 16 columns of their results lane / 4 * 2 and the next one.
struct Result {
    float peak[2], weight[2], mixed[CHUNKS][4];

    __device__ __forceinline__ void clear() {
        peak[0] = peak[1] = NOTHING, weight[0] = weight[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4 * CHUNKS; i++) mixed[i / 4][i % 4] = 0.0f;
    }

    // OWN keys and values, of which `there` are seen; their codes lie in lines from `keys` and `values` on, their scales
    // from `scales` and KEYS bytes further on.
    __device__ __forceinline__ void add(u32 keys, u32 values, u32 scales, const Queries& queries, int there, int lane) {
        // Each 16 bytes of a line are where the line's number puts them: TMA swizzles 128 or 64 bytes.
        auto at = [](u32 lines, int line, int sixteen) {
            return lines + line * LINE + (sixteen ^ (LINE == 128 ? line % 8 : line / 2 % 4)) * 16;
        };
        if (there < OWN) {
            // What lies past the context may be anything; weights of zero do not undo it.
            for (int i = lane; i < (OWN - there) * CHUNKS; i += 32)
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                                 at(values, there + i / CHUNKS, i % CHUNKS)),
                             "r"(0)
                             : "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
        }
        auto value_scale = [&](int key) { return key < there ? scale_at(scales + KEYS + key) : 0.0f; };
        const int key = lane % 4 * 2;
        const u32 low = half_pair(value_scale(key), value_scale(key + 1));
        const u32 high = half_pair(value_scale(key + 8), value_scale(key + 9));
        const float key_scale[2] = {scale_at(scales + lane / 4), scale_at(scales + lane / 4 + 8)};
        // All is asked for before any of it is used.
        u32 blocks[CHUNKS / 2][4];
#pragma unroll
        for (int k = 0; k < CHUNKS / 2; k++) load_blocks<false>(blocks[k], at(keys, lane % 16, 2 * k + lane / 16));
        float scores[4] = {}, more[4] = {}, shrink[2];
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            u32 a[4];
            decode(blocks[k / 2][k % 2 * 2], a[0], a[2]);
            decode(blocks[k / 2][k % 2 * 2 + 1], a[1], a[3]);
            multiply(k % 2 ? more : scores, a[0], a[1], a[2], a[3], queries.pairs[2 * k], queries.pairs[2 * k + 1]);
        }
#pragma unroll
        for (int k = 0; k < CHUNKS / 2; k++) load_blocks<true>(blocks[k], at(values, lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            scores[i] = (scores[i] + more[i]) * key_scale[i / 2];
            if (lane / 4 + i / 2 * 8 >= there) scores[i] = NOTHING;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float higher = fmaxf(scores[i], scores[i + 2]);
#pragma unroll
            for (int aside = 4; aside < 32; aside *= 2)
                higher = fmaxf(higher, __shfl_xor_sync(0xFFFFFFFF, higher, aside));
            higher = fmaxf(peak[i], higher * queries.unit[i]);
            shrink[i] = power_of_two(peak[i] - higher);
            scores[i] = power_of_two(scores[i] * queries.unit[i] - higher);
            scores[i + 2] = power_of_two(scores[i + 2] * queries.unit[i] - higher);
            peak[i] = higher, weight[i] = weight[i] * shrink[i] + scores[i] + scores[i + 2];
        }
        if (__any_sync(0xFFFFFFFF, shrink[0] < 1.0f || shrink[1] < 1.0f)) {
#pragma unroll
            for (int i = 0; i < 4 * CHUNKS; i++) mixed[i / 4][i % 4] *= shrink[i % 2];
        }
        const u32 b0 = turn_over(half_pair(scores[0], scores[1])), b1 = turn_over(half_pair(scores[2], scores[3]));
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            u32 a[4];
            decode(__byte_perm(blocks[k / 2][k % 2 * 2], 0, 0x3120), a[0], a[1]);
            decode(__byte_perm(blocks[k / 2][k % 2 * 2 + 1], 0, 0x3120), a[2], a[3]);
            multiply(mixed[k], times(a[0], low), times(a[1], low), times(a[2], high), times(a[3], high), b0, b1);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS + FETCHERS, 1)
    attend(const __grid_constant__ TensorMap key_blocks, const __grid_constant__ TensorMap value_blocks,
           const __grid_constant__ TensorMap key_rows, const __grid_constant__ TensorMap value_rows, const u16* query,
           u16* out, const float* sinks, const int* table, const int4* listed, int* arrived, float* partial, int* taken,
           int lines, int table_stride, float scale, const unsigned char* key_scales, const unsigned char* value_scales,
           int sixteens) {
    extern __shared__ char memory[];
    __shared__ Piece known[KNOWN];
    __shared__ int last[GROUPS];
    const u32 start = (u32)__cvta_generic_to_shared(memory), ring = (start + 1023) & ~1023u;
    const u32 scales = ring + STAGES * PLACE, barriers = scales + STAGES * SCALES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int step = 0;  // blocks of keys that went through the ring: step s is in place s % STAGES
    auto full = [&](int of) { return barriers + 16 * (of % STAGES); };
    auto empty = [&](int of) { return barriers + 16 * (of % STAGES) + 8; };

    launch_next();
    if (threadIdx.x == THREADS) {
        for (int i = 0; i < STAGES; i++) {
            set_up(full(i), 1);
            set_up(empty(i), THREADS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (warp >= THREADS / 32) {
        // One thread takes pieces and fetches.
        if (threadIdx.x > THREADS) return;
        look_up(WHOLE ? &key_blocks : &key_rows);
        look_up(WHOLE ? &value_blocks : &value_rows);
        const u64 once = read_once();
        bool waited = false;
        auto wait_once = [&]() {
            if (!waited) wait_for_inputs();
            waited = true;
        };
        // Those who multiply read the line once the piece's first block, or the end, is announced. It is written over
        // KNOWN pieces later: each of those has a block, the ring has STAGES, so that all warps have read it by then.
        auto take = [&](int which, int at) {
            const Piece piece = piece_of(listed, which, lines);
            known[at % KNOWN] = piece;
            return piece;
        };
        Piece piece = take(blockIdx.x, 0);
        for (int count = 1; piece.tokens > 0; count++) {
            const int* units = table + (size_t)piece.row * table_stride;
            for (int key = piece.begin; key < piece.finish; key += KEYS, step++) {
                if (key + KEYS > piece.history) wait_once();
                const int fetches = (min(KEYS, piece.finish - key) + FETCHED - 1) / FETCHED;
                const u32 barrier = full(step), place = ring + step % STAGES * PLACE;
                const u32 factors = scales + step % STAGES * SCALES;
                if (step >= STAGES) wait(empty(step), (step / STAGES & 1) ^ 1);
                expect(barrier, fetches * FETCHED * (LINE + 1) * 2);
                const int count_at_once = WHOLE && fetches == KEYS / FETCHED ? KEYS : FETCHED;
                for (int i = 0; i < fetches * FETCHED; i += count_at_once) {
                    const int from = key + i, unit = units[from / PAGE], offset = from % PAGE;
                    const size_t of = (size_t)unit * sixteens * 16 + piece.head * PAGE + offset;
                    const bool whole = count_at_once == KEYS;
                    const TensorMap* keys = whole ? &key_blocks : &key_rows;
                    const TensorMap* values = whole ? &value_blocks : &value_rows;
                    fetch(place + i * LINE, keys, offset, piece.head, unit, barrier, once);
                    fetch(place + BLOCK + i * LINE, values, offset, piece.head, unit, barrier, once);
                    fetch_scales(factors + i, key_scales + of, count_at_once, barrier);
                    fetch_scales(factors + KEYS + i, value_scales + of, count_at_once, barrier);
                }
            }
            // Before the wait nothing is written that another program sees.
            wait_once();
            piece = take(gridDim.x + atomicAdd(taken, 1), count);
        }
        wait_once();
        if (step >= STAGES) wait(empty(step), (step / STAGES & 1) ^ 1);
        arrive(full(step));
        // The last program leaves the counters as it found them.
        if (count_up(taken + 1) == gridDim.x - 1) taken[0] = taken[1] = 0;
        return;
    }

    const int group = warp / 4, thread = threadIdx.x % 128, within = warp % 4, column = lane % 4 * 2;
    float* sums = (float*)(memory + (barriers - start) + 16 * STAGES + group * SUMS);
    wait_for_inputs();

    for (int count = 0;; count++) {
        wait(full(step), step / STAGES & 1);
        const Piece piece = known[count % KNOWN];
        if (piece.tokens == 0) return;
        const int blocks = (piece.finish - piece.begin + KEYS - 1) / KEYS;
        if (count % GROUPS != group) {
            // The other group's piece: a place is empty when all warps have left it.
            for (int i = 0; i < blocks; i++, step++) {
                wait(full(step), step / STAGES & 1);
                // No lane is left behind that would still wait for this block, or read the piece.
                __syncwarp();
                if (lane == 0) arrive(empty(step));
            }
            continue;
        }
        const size_t corner = ((size_t)piece.token * KV_HEADS + piece.head) * GROUP * DIM;
        // Where a part's results go: by part, then as in `out`.
        auto part_at = [&](int part, int of) {
            return partial + ((size_t)(piece.room + part) * HEADS + piece.head * GROUP + of) * PARTIAL;
        };
        auto sunk = [&](float weight, float peak, int of) {
            return sinks ? weight + power_of_two(sinks[piece.head * GROUP + of] * LOG2_E - peak) : weight;
        };
        Queries queries;
        queries.read(query + corner, scale * LOG2_E, lane);
        Result result;
        result.clear();
        for (int key = piece.begin + within * OWN, block = 0; block < blocks; key += KEYS, block++, step++) {
            const u32 own = ring + step % STAGES * PLACE + within * OWN * LINE;
            wait(full(step), step / STAGES & 1);
            const int there = piece.finish - key;
            if (there > 0)
                result.add(own, own + BLOCK, scales + step % STAGES * SCALES + within * OWN, queries, there, lane);
            __syncwarp();
            if (lane == 0) arrive(empty(step));
        }
        // All have read the results of the piece before.
        meet(1 + group, 128);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float* mine = sums + (within * NARROW + column + i) * PITCH;
#pragma unroll
            for (int aside = 4; aside < 32; aside *= 2)
                result.weight[i] += __shfl_xor_sync(0xFFFFFFFF, result.weight[i], aside);
#pragma unroll
            for (int k = 0; k < CHUNKS; k++)
                *(float2*)(mine + 16 * k + lane / 4 * 2) = make_float2(result.mixed[k][i], result.mixed[k][i + 2]);
            if (lane < 4) mine[DIM] = result.peak[i], mine[DIM + 1] = result.weight[i];
        }
        meet(1 + group, 128);
        // A warp has a row, a thread SOME neighbouring columns of it.
        const int at = lane * SOME;
        for (int of = within; of < GROUP; of += 4) {
            Row whole;
            whole.clear();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* theirs = sums + (i * NARROW + of) * PITCH;
                whole.add(theirs + at, theirs[DIM], theirs[DIM + 1]);
            }
            if (piece.parts == 1)
                whole.finish(out + corner + of * DIM + at, sunk(whole.weight, whole.peak, of));
            else
                whole.leave(part_at(piece.part, of), at);
        }
        if (piece.parts == 1) continue;
        // The last piece of a row to be finished adds all. Each has stored before one of its threads says so, and that
        // one knows of the others before all read.
        meet(1 + group, 128);
        if (thread == 0) {
            int* counter = arrived + ((piece.line - piece.part) * KV_HEADS + piece.head) * GROUPS;
            last[group] = count_up(counter) == piece.parts - 1;
            if (last[group]) *counter = 0;
        }
        meet(1 + group, 128);
        if (!last[group]) continue;
        for (int of = within; of < GROUP; of += 4) {
            Row whole;
            whole.clear();
#pragma unroll 4
            for (int part = 0; part < piece.parts; part++) {
                // Written by other programs: not to be found in a cache of one's own.
                float theirs[SOME];
                const float2 found = __ldcg((const float2*)(part_at(part, of) + DIM));
#pragma unroll
                for (int i = 0; i < SOME; i += 2)
                    *(float2*)(theirs + i) = __ldcg((const float2*)(part_at(part, of) + at + i));
                whole.add(theirs, found.x, found.y);
            }
            whole.finish(out + corner + of * DIM + at, sunk(whole.weight, whole.peak, of));
        }
    }
}
