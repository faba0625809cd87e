// Split-K attention over paged keys and values, on Hopper: of short rows, bound by reading them, and of long steps.
//
// `PieceQueue` lists work items: some keys, in blocks of 64, of a tile of up to 2 * QUERIES tokens of a row. Each line
// is one item per key head. Persistent programs take items from the queue dynamically, since some multiprocessors get
// less memory bandwidth than others. One producer thread takes items and has the copy engine (TMA) load their keys and
// values into a ring of STAGES stages. Two warp groups multiply: they share the tokens of an item, or alternate between
// items of up to QUERIES tokens.
//
// Query heads that share a key head are rows of one matrix: row r is token r / GROUP, head r % GROUP. The program that
// finishes the last item of a tile merges the partial results in order, so the result is deterministic.
//
// One token's heads would leave most of 64 rows empty, and a power-limited GPU pays for empty rows. So up to NARROW
// rows become columns and keys the rows (transposed): each warp has 16 keys of a block; all four are reduced at last.
//
// Keys of earlier steps do not depend on preceding kernels, so the ring is full of them before those have ended. The
// list and the table are older than the model's first kernel. Everything else is read, and anything written, after the
// wait.
//
// A wide piece takes two blocks of keys at a time, after one or two single ones, while the values of those before are
// added: 128 scores a row wait, and rescale its results, half as often as 64 would.
//
// `attention.py` compiles this file with DIM, GROUP, KV_HEADS, PAGE and STAGES defined, and with `hopper.cu`,
// `queue.cu`, `score` and `gather` before it: instructions of the matrix units, scores[64 x 64] (+)= queries[64 x 16]
// keys[64 x 16]^T and mixed[64 x DIM] += weights[64 x 16] values[16 x DIM].

constexpr int HALVES = DIM / 64, QUERIES = 64 / GROUP;
constexpr int SUMS = DIM / 2;  // of a tile's results, those of a thread
// Bytes of a line of 64 columns, of all keys' lines of one half, of a block's keys or values, and of both.
constexpr u32 LINE = 128, HALF = KEYS * LINE, BLOCK = HALVES * HALF, PLACE = 2 * BLOCK;

static_assert(GROUP <= 64, "the heads of one token are rows of one matrix");
static_assert(4 * NARROW * PITCH * 4 <= PLACE, "warps add up where a block was");

// FETCHED or KEYS keys, or values, of one head into a place of the ring.
__device__ __forceinline__ void fetch(u32 to, const TensorMap* map, int token, int half, int head, int unit,
                                      u32 barrier, u64 mark) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to), "l"(map), "r"(0), "r"(token), "r"(half), "r"(head),
        "r"(unit), "r"(barrier), "l"(mark)
        : "memory");
}

// The running softmax of a thread's two rows: highest score, sum of weights, weighted values. Scores are in units of
// log 2. A thread has two neighbouring columns of every eight; four threads share a row.
struct Result {
    float peak[2], weight[2], mixed[SUMS];

    __device__ __forceinline__ void clear() {
        peak[0] = peak[1] = NOTHING, weight[0] = weight[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < SUMS; i++) mixed[i] = 0.0f;
    }
};

// Blocks of keys that are multiplied together.
template <int COUNT>
struct Blocks {
    static constexpr int blocks = COUNT;
};

// An instruction of a warp: sums[16 x 8] += a[16 x 16] b[16 x 8].
__device__ __forceinline__ void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The running softmax of a narrow piece's rows over the keys of one warp, and of a thread: rows `column` and
// `column + 1`, of every 16 columns of their results lane / 4 and the one 8 further on.
struct NarrowResult {
    float peak[2], weight[2], mixed[DIM / 16][4];

    __device__ __forceinline__ void clear() {
        peak[0] = peak[1] = NOTHING, weight[0] = weight[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < DIM / 4; i++) mixed[i / 4][i % 4] = 0.0f;
    }

    // OWN keys and values, which lie in lines from `keys` and `values` on. A row sees the keys before its `end`, and
    // none sees more than `there`.
    __device__ __forceinline__ void add(u32 keys, u32 values, const u32 (&queries)[DIM / 8], int there,
                                        const int (&end)[2], float unit_score, int lane) {
        // Lines of 128 bytes, in which each 16 bytes are where the line's number puts them.
        auto at = [](u32 lines, int line, int sixteen) {
            return lines + sixteen / 8 * HALF + line * LINE + (sixteen % 8 ^ line % 8) * 16;
        };
        if (there < OWN) {
            // What lies past the context may be anything; weights of zero do not undo it.
            for (int i = lane; i < (OWN - there) * HALVES * 8; i += 32)
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                                 at(values, there + i / 8 / HALVES, i % (8 * HALVES))),
                             "r"(0)
                             : "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
        }
        // All is asked for before any of it is used.
        u32 blocks[DIM / 16][4];
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) load_blocks<false>(blocks[k], at(keys, lane % 16, 2 * k + lane / 16));
        float scores[4] = {}, more[4] = {}, shrink[2];
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
            multiply(k % 2 ? more : scores, blocks[k], queries[2 * k], queries[2 * k + 1]);
#pragma unroll
        for (int k = 0; k < DIM / 16; k++)
            load_blocks<true>(blocks[k], at(values, lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            scores[i] += more[i];
            if (lane / 4 + i / 2 * 8 >= end[i % 2]) scores[i] = NOTHING;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float higher = fmaxf(scores[i], scores[i + 2]);
#pragma unroll
            for (int aside = 4; aside < 32; aside *= 2)
                higher = fmaxf(higher, __shfl_xor_sync(0xFFFFFFFF, higher, aside));
            higher = fmaxf(peak[i], higher * unit_score);
            // A row may see nothing of a warp's keys.
            const float anchor = higher == NOTHING ? 0.0f : higher;
            shrink[i] = power_of_two(peak[i] - anchor);
            scores[i] = power_of_two(scores[i] * unit_score - anchor);
            scores[i + 2] = power_of_two(scores[i + 2] * unit_score - anchor);
            peak[i] = higher, weight[i] = weight[i] * shrink[i] + scores[i] + scores[i + 2];
        }
        if (__any_sync(0xFFFFFFFF, shrink[0] < 1.0f || shrink[1] < 1.0f)) {
#pragma unroll
            for (int i = 0; i < DIM / 4; i++) mixed[i / 4][i % 4] *= shrink[i % 2];
        }
        const u32 b0 = turn_over(pair_of(scores[0], scores[1])), b1 = turn_over(pair_of(scores[2], scores[3]));
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) multiply(mixed[k], blocks[k], b0, b1);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS + FETCHERS, 1)
    attend(const __grid_constant__ TensorMap key_blocks, const __grid_constant__ TensorMap value_blocks,
           const __grid_constant__ TensorMap key_rows, const __grid_constant__ TensorMap value_rows, const u16* query,
           u16* out, const float* sinks, const int* table, const int4* listed, int* arrived, float* partial, int* taken,
           int lines, int table_stride, float scale) {
    extern __shared__ char memory[];
    __shared__ Piece known[KNOWN];
    __shared__ int last[GROUPS];
    const u32 ring = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u, barriers = ring + STAGES * PLACE;
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
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
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
                if (step >= STAGES) wait(empty(step), (step / STAGES & 1) ^ 1);
                expect(barrier, fetches * FETCHED * LINE * HALVES * 2);
                if (WHOLE && fetches == KEYS / FETCHED) {
                    const int unit = units[key / PAGE];
                    fetch(place, &key_blocks, key % PAGE, 0, piece.head, unit, barrier, once);
                    fetch(place + BLOCK, &value_blocks, key % PAGE, 0, piece.head, unit, barrier, once);
                } else {
                    for (int i = 0; i < fetches; i++) {
                        const int from = key + i * FETCHED, unit = units[from / PAGE], offset = from % PAGE;
                        const u32 to = place + i * FETCHED * LINE;
#pragma unroll
                        for (int half = 0; half < HALVES; half++) {
                            fetch(to + half * HALF, &key_rows, offset, half, piece.head, unit, barrier, once);
                            fetch(to + BLOCK + half * HALF, &value_rows, offset, half, piece.head, unit, barrier, once);
                        }
                    }
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

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = warp / 4, thread = threadIdx.x % 128, within = warp % 4;
    // A thread's rows of the matrix are `row` and `row + 8`.
    const int row = within * 16 + lane / 4, column = lane % 4 * 2;
    const float unit_score = scale * LOG2_E;
    int turn = 0;
    wait_for_inputs();

    for (int count = 0;; count++) {
        wait(full(step), step / STAGES & 1);
        // Read where it is needed: a copy would take registers that the products need.
        const Piece& piece = known[count % KNOWN];
        if (piece.tokens == 0) return;
        const bool alone = piece.tokens <= QUERIES;
        const int skipped = alone ? 0 : group * QUERIES;
        const int blocks = (piece.finish - piece.begin + KEYS - 1) / KEYS;
        int rows = max(0, min(piece.tokens - skipped, QUERIES)) * GROUP;
        if (alone && turn != group) rows = 0;
        turn ^= alone;
        if (rows == 0) {
            // The other group's piece: a place is empty when all warps have left it.
            for (int i = 0; i < blocks; i++, step++) {
                wait(full(step), step / STAGES & 1);
                // No lane is left behind that would still wait for this block, or read the piece.
                __syncwarp();
                if (lane == 0) arrive(empty(step));
            }
            continue;
        }
        const int first = piece.first + skipped;
        auto corner = [&]() { return ((size_t)(piece.token + skipped) * KV_HEADS + piece.head) * GROUP * DIM + column; };
        auto row_at = [&](int of) { return (size_t)(of / GROUP) * HEADS * DIM + of % GROUP * DIM; };
        // Where a part's results go: by token, then as in `out`.
        auto part_at = [&](int part, int of) {
            const size_t at = (size_t)(piece.room + part * piece.tokens + skipped) + of / GROUP;
            return partial + (at * HEADS + piece.head * GROUP + of % GROUP) * PARTIAL;
        };
        // Whether this is the last of a tile's pieces to be finished. All have stored before one says so, and that one
        // knows of the others before all read.
        auto is_last = [&]() {
            meet(1 + group, 128);
            if (thread == 0) {
                int* counter = arrived + ((piece.line - piece.part) * KV_HEADS + piece.head) * GROUPS + (skipped > 0);
                last[group] = count_up(counter) == piece.parts - 1;
                if (last[group]) *counter = 0;
            }
            meet(1 + group, 128);
            return last[group] != 0;
        };
        // Written by other programs: not to be found in a cache of one's own.
        auto peak_and_weight = [&](int part, int of) { return __ldcg((const float2*)(part_at(part, of) + DIM)); };
        auto sunk = [&](float weight, float peak, int of) {
            return sinks ? weight + power_of_two(sinks[piece.head * GROUP + of % GROUP] * LOG2_E - peak) : weight;
        };

        if (alone && rows <= NARROW) {
            u32 queries[DIM / 8];
#pragma unroll
            for (int i = 0; i < DIM / 8; i++)
                queries[i] = lane / 4 < rows ? *(const u32*)(query + corner() + row_at(lane / 4) + i * 8) : 0;
            NarrowResult result;
            result.clear();
            int block = 0;
            for (int key = piece.begin + within * OWN; block < blocks; key += KEYS, block++) {
                const u32 own = ring + (step + block) % STAGES * PLACE + within * OWN * LINE;
                wait(full(step + block), (step + block) / STAGES & 1);
                const int there = piece.finish - key;
                const int end[2] = {min(there, first + 1 + column / GROUP - key),
                                    min(there, first + 1 + (column + 1) / GROUP - key)};
                if (there > 0) result.add(own, own + BLOCK, queries, there, end, unit_score, lane);
                __syncwarp();
                if (block + 1 < blocks && lane == 0) arrive(empty(step + block));
            }
            step += blocks - 1;
            // The four warps' results lie where the last block was, once all have read it.
            float* sums = (float*)(memory + (ring - (u32)__cvta_generic_to_shared(memory)) + step % STAGES * PLACE);
            meet(1 + group, 128);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float* mine = sums + (within * NARROW + column + i) * PITCH;
#pragma unroll
                for (int aside = 4; aside < 32; aside *= 2)
                    result.weight[i] += __shfl_xor_sync(0xFFFFFFFF, result.weight[i], aside);
#pragma unroll
                for (int k = 0; k < DIM / 16; k++) {
                    mine[16 * k + lane / 4] = result.mixed[k][i];
                    mine[16 * k + lane / 4 + 8] = result.mixed[k][i + 2];
                }
                if (lane < 4) mine[DIM] = result.peak[i], mine[DIM + 1] = result.weight[i];
            }
            meet(1 + group, 128);
            // A warp has a row, a thread SOME neighbouring columns of it.
            const int at = lane * SOME;
            for (int of = within; of < rows; of += 4) {
                Row whole;
                whole.clear();
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float* theirs = sums + (i * NARROW + of) * PITCH;
                    whole.add(theirs + at, theirs[DIM], theirs[DIM + 1]);
                }
                if (piece.parts == 1)
                    whole.finish(out + corner() - column + row_at(of) + at, sunk(whole.weight, whole.peak, of));
                else
                    whole.leave(part_at(piece.part, of), at);
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane == 0) arrive(empty(step));
            step++;
            if (piece.parts == 1 || !is_last()) continue;
            for (int of = within; of < rows; of += 4) {
                Row whole;
                whole.clear();
#pragma unroll 4
                for (int part = 0; part < piece.parts; part++) {
                    float theirs[SOME];
                    const float2 found = peak_and_weight(part, of);
#pragma unroll
                    for (int i = 0; i < SOME; i += 2)
                        *(float2*)(theirs + i) = __ldcg((const float2*)(part_at(part, of) + at + i));
                    whole.add(theirs, found.x, found.y);
                }
                whole.finish(out + corner() - column + row_at(of) + at, sunk(whole.weight, whole.peak, of));
            }
            continue;
        }

        u32 queries[DIM / 4], weights[2][KEYS / 4];
#pragma unroll
        for (int i = 0; i < DIM / 4; i++) {
            const int of = row + i % 2 * 8;
            queries[i] = of < rows ? *(const u32*)(query + corner() + row_at(of) + i / 2 * 8) : 0;
        }
        Result result;
        result.clear();
        float scores[2][KEYS / 2], shrink[2];

        // Wait for the next blocks and begin to multiply their keys.
        auto begin_scores = [&](auto now, int key) {
#pragma unroll
            for (int block = 0; block < now.blocks; block++) {
                wait(full(step + block), (step + block) / STAGES & 1);
                const int there = piece.finish - key - block * KEYS;
                if (there < KEYS) {
                    // What lies past the context may be anything; weights of zero do not undo it.
                    const u32 values = ring + (step + block) % STAGES * PLACE + BLOCK;
                    for (int i = thread; i < (KEYS - there) * HALVES * 8; i += 128) {
                        const u32 past = there + i / 8 / HALVES;
                        const u32 at = values + i / 8 % HALVES * HALF + past * LINE + i % 8 * 16;
                        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
                    }
                    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                    meet(1 + group, 128);
                }
            }
            begin_products();
#pragma unroll
            for (int block = 0; block < now.blocks; block++) {
                const u32 keys = ring + (step + block) % STAGES * PLACE;
#pragma unroll
                for (int k = 0; k < DIM / 16; k++)
                    score(scores[block], queries[4 * k], queries[4 * k + 1], queries[4 * k + 2], queries[4 * k + 3],
                          block_at(keys + k / 4 * HALF) + 2 * (k % 4), k != 0);
            }
            commit_products();
        };
        // Begin to add the values of earlier blocks, as their weights have them.
        auto begin_values = [&](auto before, int first_step) {
            begin_products();
#pragma unroll
            for (int block = 0; block < before.blocks; block++) {
                const u32 values = ring + (first_step + block) % STAGES * PLACE + BLOCK;
#pragma unroll
                for (int k = 0; k < KEYS / 16; k++)
                    gather(result.mixed, weights[block][4 * k], weights[block][4 * k + 1], weights[block][4 * k + 2],
                           weights[block][4 * k + 3], block_at(values, HALF) + k * (16 * LINE >> 4));
            }
            commit_products();
        };
        // Scores become weights; `shrink` is what that makes of the results so far.
        auto soften = [&](auto now, int key) {
            if (key + now.blocks * KEYS - 1 > first) {
#pragma unroll
                for (int block = 0; block < now.blocks; block++) {
#pragma unroll
                    for (int i = 0; i < KEYS / 2; i++) {
                        const int position = first + (row + i / 2 % 2 * 8) / GROUP;
                        if (key + block * KEYS + i / 4 * 8 + column + i % 2 > position) scores[block][i] = NOTHING;
                    }
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                shrink[half] = 1.0f;
                if (within * 16 + 8 * half >= rows) continue;
                float higher = NOTHING;
#pragma unroll
                for (int i = 2 * half; i < KEYS / 2; i += 4) {
#pragma unroll
                    for (int block = 0; block < now.blocks; block++)
                        higher = fmaxf(higher, fmaxf(scores[block][i], scores[block][i + 1]));
                }
                higher = fmaxf(higher, __shfl_xor_sync(0xFFFFFFFF, higher, 1));
                higher = fmaxf(higher, __shfl_xor_sync(0xFFFFFFFF, higher, 2));
                higher = fmaxf(result.peak[half], higher * unit_score);
                // A row may see nothing of a tile's later blocks.
                const float anchor = higher == NOTHING ? 0.0f : higher;
                shrink[half] = power_of_two(result.peak[half] - anchor);
                float sum = 0.0f;
#pragma unroll
                for (int block = 0; block < now.blocks; block++) {
#pragma unroll
                    for (int i = 2 * half; i < KEYS / 2; i += 4) {
                        scores[block][i] = power_of_two(scores[block][i] * unit_score - anchor);
                        scores[block][i + 1] = power_of_two(scores[block][i + 1] * unit_score - anchor);
                        sum += scores[block][i] + scores[block][i + 1];
                    }
                }
                result.peak[half] = higher, result.weight[half] = result.weight[half] * shrink[half] + sum;
            }
        };
        auto pack = [&](auto now) {
#pragma unroll
            for (int block = 0; block < now.blocks; block++) {
#pragma unroll
                for (int i = 0; i < KEYS / 4; i++)
                    weights[block][i] = pair_of(scores[block][2 * i], scores[block][2 * i + 1]);
            }
        };
        auto pin_scores = [&](auto now) {
#pragma unroll
            for (int block = 0; block < now.blocks; block++) pin(scores[block]);
        };
        // The places of `before` blocks from the current step on are empty.
        auto leave = [&](auto before, int first_step) {
            if (lane == 0) {
#pragma unroll
                for (int block = 0; block < before.blocks; block++) arrive(empty(first_step + block));
            }
        };
        // While the values of the blocks before are added, the next ones' scores become weights.
        auto advance = [&](auto now, auto before, int key) {
            const int first_step = step;
            step += before.blocks;
            begin_scores(now, key);
            begin_values(before, first_step);
            wait_for_products<1>();
            pin_scores(now);
            soften(now, key);
            wait_for_products<0>();
            pin(result.mixed);
            leave(before, first_step);
            if (__any_sync(0xFFFFFFFF, shrink[0] < 1.0f || shrink[1] < 1.0f)) {
#pragma unroll
                for (int i = 0; i < SUMS; i++) result.mixed[i] *= shrink[i / 2 % 2];
            }
            pack(now);
        };
        auto end = [&](auto before) {
            begin_values(before, step);
            wait_for_products<0>();
            pin(result.mixed);
            leave(before, step);
            step += before.blocks;
        };

        const Blocks<1> one{};
        const Blocks<2> two{};
        int key = piece.begin;
        begin_scores(one, key);
        wait_for_products<0>();
        pin_scores(one);
        soften(one, key);
        pack(one);
        key += KEYS;
        if (blocks % 2 == 0) {
            advance(one, one, key);
            key += KEYS;
        }
        if (key < piece.finish) {
            advance(two, one, key);
            for (key += 2 * KEYS; key < piece.finish; key += 2 * KEYS) advance(two, two, key);
            end(two);
        } else {
            end(one);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            result.weight[half] += __shfl_xor_sync(0xFFFFFFFF, result.weight[half], 1);
            result.weight[half] += __shfl_xor_sync(0xFFFFFFFF, result.weight[half], 2);
        }

        if (piece.parts > 1) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int of = row + 8 * half;
                if (of >= rows) continue;
                float* mine = part_at(piece.part, of);
#pragma unroll
                for (int i = 2 * half; i < SUMS; i += 4)
                    __stcg((float2*)(mine + i / 4 * 8 + column), make_float2(result.mixed[i], result.mixed[i + 1]));
                if (lane % 4 == 0) __stcg((float2*)(mine + DIM), make_float2(result.peak[half], result.weight[half]));
            }
            if (!is_last()) continue;
            result.clear();
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int of = row + 8 * half;
                if (of >= rows) continue;
#pragma unroll 4
                for (int part = 0; part < piece.parts; part++)
                    result.peak[half] = fmaxf(result.peak[half], peak_and_weight(part, of).x);
#pragma unroll 2
                for (int part = 0; part < piece.parts; part++) {
                    const float* other = part_at(part, of) + column;
                    const float2 found = peak_and_weight(part, of);
                    const float share = power_of_two(found.x - result.peak[half]);
                    result.weight[half] += found.y * share;
#pragma unroll
                    for (int i = 2 * half; i < SUMS; i += 4) {
                        const float2 two = __ldcg((const float2*)(other + i / 4 * 8));
                        result.mixed[i] += two.x * share, result.mixed[i + 1] += two.y * share;
                    }
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int of = row + 8 * half;
            if (of >= rows) continue;
            const float whole = 1.0f / sunk(result.weight[half], result.peak[half], of);
            u16* to = out + corner() + row_at(of);
#pragma unroll
            for (int i = 2 * half; i < SUMS; i += 4)
                *(u32*)(to + i / 4 * 8) = pair_of(result.mixed[i] * whole, result.mixed[i + 1] * whole);
        }
    }
}
