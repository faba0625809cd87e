// The same for more tokens: the codes become the first operand of wgmma in registers, all tokens are the second,
// in shared memory.
//
// A program takes ROWS rows and one of SPLITS parts of the depth; each of its WARP_GROUPS warp groups has STACKED blocks
// of 64 rows, and all share the inputs. The copy engine brings the bricks of two blocks of columns at a time, RING such
// pairs ahead. Inputs pass through registers, which deal out their columns as the bricks have them. Programs that share
// rows form a cluster and add up through distributed shared memory. Scales multiply the weights, in bfloat16.
//
// Compiled with `codes.cu` before it, with WARP_GROUPS, STACKED, SPLITS and RING defined, and `multiply_all` before it:
// one wgmma, d[64 x TOKENS] (+)= a[64 x 16] b[TOKENS x 16]^T, with a in registers. Each part of the depth has a pair of
// blocks of columns at least.

constexpr int SLABS = 4 * WARP_GROUPS * STACKED, ROWS = 16 * SLABS, OUTPUTS = GATED ? ROWS / 2 : ROWS, QUADS = OUTPUTS / 4;
constexpr int TOGETHER = 2, KEPT = 3;  // blocks of columns that arrive together; of how many arrivals inputs are kept
constexpr u32 LINE = 128, INPUTS = TOKENS * LINE, ARRIVAL = TOGETHER * INPUTS;
constexpr int RUNS = GROUP % 128 == 0 ? 1 : TOGETHER;  // of scales that arrive together
// Bytes of a place of the ring. A box, and what it brings, are multiples of 128 bytes.
constexpr u32 CODES_BYTES = SLABS * TOGETHER * BRICK, SCALES_BYTES = SLABS * RUNS * 8 * SMALL + 127 & ~127u;
constexpr u32 ZEROS_BYTES = ZEROS ? SLABS * RUNS * 8 * SMALL_ZEROS + 127 & ~127u : 0;
constexpr u32 PLACE = CODES_BYTES + SCALES_BYTES + ZEROS_BYTES;
constexpr int SETS = 2, AT_ONCE = 2;  // sets of operands, one of which is multiplied; steps of a set
constexpr int EIGHTS = TOGETHER * TOKENS * 8, TURNS = (EIGHTS + THREADS - 1) / THREADS;  // of inputs, 16 bytes each
constexpr int SUM_PITCH = ROWS + 4, SHARE = TOKENS / SPLITS;

// Copy a box of a tensor of three dimensions that is read once; it arrives at a barrier. Outside of the tensor are zeros.
__device__ __forceinline__ void fetch_box(u32 to, const TensorMap* map, int second, int third, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(0), "r"(second), "r"(third), "r"(barrier),
        "l"(read_once())
        : "memory");
}

// Writes to shared memory become visible to wgmma.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void set_up_arrivals(u32 barriers) {
    for (int i = 0; i < RING; i++) set_up(barriers + i * 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// A lane's part of a brick; `run` is that of its scales.
__device__ __forceinline__ void read_brick(Brick& to, u32 place, int slab, int which, int run, int lane) {
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        to.codes[i] = read_four(place + (slab * TOGETHER + which) * BRICK + i * 512 + lane * 16);
    const u32 row = (slab * RUNS + run) * 8 + lane / 4;
    read_small<SMALL>(to.scales, place + CODES_BYTES + row * SMALL);
    if (ZEROS) read_small<SMALL_ZEROS>(to.zeros, place + CODES_BYTES + SCALES_BYTES + row * SMALL_ZEROS);
}

// The operand of a step, times its scales.
__device__ __forceinline__ void weigh(u32 (&pairs)[4], const Brick& brick, int step) {
    operand(pairs, brick, step);
    const float scale = scale_of(brick, step / STEPS, 0), second = scale_of(brick, step / STEPS, 1);
    const u32 by[2] = {pair_of(scale, scale), pair_of(second, second)};
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = times(pairs[i], by[i % 2]);
}

// Where the first two of eight neighbouring columns go, so that the operands of the bricks find them; lines of 128 bytes
// with the 128-byte swizzle.
__device__ __forceinline__ u32 dealt_to(int token, int eight) {
    const int word = DEALT == 8 ? eight / 4 * 16 + eight % 4 : eight / 2 * 8 + eight % 2 * 2;
    return token * LINE + (word / 4 ^ token % 8) * 16 + word % 4 * 4;
}

// The others go elsewhere in a line.
__device__ __forceinline__ void deal_out(u32 to, const uint4& given) {
    write_word(to, given.x);
    write_word(to ^ 16, given.y);
    write_word(to ^ (DEALT == 8 ? 32 : 4), given.z);
    write_word(to ^ (DEALT == 8 ? 48 : 20), given.w);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    wide(const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap scales,
         const __grid_constant__ TensorMap zeros, const u16* x, const float* factors, const u16* bias, void* out,
         int tokens, int width, int depth, int stride) {
    extern __shared__ char memory[];
    const u32 shared = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u, ring = shared + KEPT * ARRIVAL;
    const u32 barriers = ring + RING * PLACE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = blockIdx.x % SPLITS, tile = blockIdx.x / SPLITS;
    const int blocks = depth / 64, all = (blocks + TOGETHER - 1) / TOGETHER;
    const int begin = all * part / SPLITS, arrivals = all * (part + 1) / SPLITS - begin;
    const Outputs outputs = {bias, out, nullptr, nullptr, tokens, width};
    if (threadIdx.x == 0) set_up_arrivals(barriers);
    launch_next();

    auto run_of = [](int block) { return block / RUN; };
    auto fetch = [&](int arrival) {
        if (threadIdx.x > 0 || arrival >= arrivals) return;
        const u32 barrier = barriers + arrival % RING * 8, place = ring + arrival % RING * PLACE;
        const int block = (begin + arrival) * TOGETHER, run = run_of(block);
        expect(barrier, PLACE);
        fetch_box(place, &codes, block * PIECES, tile * SLABS, barrier);
        fetch_box(place + CODES_BYTES, &scales, run, tile * SLABS, barrier);
        if (ZEROS) fetch_box(place + CODES_BYTES + SCALES_BYTES, &zeros, run, tile * SLABS, barrier);
    };
#pragma unroll 1
    for (int i = 0; i < RING - 1; i++) fetch(i);
    wait_for_inputs();

    // A thread's inputs: neighbours of a token in each turn. Past the last column they are zeros.
    const u16* from[TURNS];
    u32 to[TURNS];
    uint4 held[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int at = threadIdx.x + i * THREADS, eight = at % 8, token = at / 8 % TOKENS, block = at / 8 / TOKENS;
        from[i] = x + (size_t)token * stride + (begin * TOGETHER + block) * 64 + eight * 8;
        to[i] = block * INPUTS + dealt_to(token, eight);
    }
    auto hold = [&](int arrival) {
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            const int at = threadIdx.x + i * THREADS, block = (begin + arrival) * TOGETHER + at / 8 / TOKENS;
            held[i] = {};
            if (at < EIGHTS && at / 8 % TOKENS < tokens && arrival < arrivals && block < blocks)
                held[i] = *(const uint4*)(from[i] + arrival * TOGETHER * 64);
        }
    };
    float sums[STACKED][TOKENS / 2];
    auto pin_all = [&] {
#pragma unroll
        for (int i = 0; i < STACKED; i++) pin(sums[i]);
    };
    u32 pairs[SETS][AT_ONCE][STACKED][4];
    hold(0);
    for (int arrival = 0; arrival < arrivals; arrival++) {
        const u32 inputs = shared + arrival % KEPT * ARRIVAL, place = ring + arrival % RING * PLACE;
#pragma unroll
        for (int i = 0; i < TURNS; i++)
            if ((i + 1) * THREADS <= EIGHTS || threadIdx.x + i * THREADS < EIGHTS) deal_out(inputs + to[i], held[i]);
        publish();
        // Whoever is here has read the bricks of the last arrival, and has at most its products under way: those of the
        // one before it have read their inputs.
        __syncthreads();
        fetch(arrival + RING - 1);
        hold(arrival + 1);
        wait(barriers + arrival % RING * 8, arrival / RING & 1);
#pragma unroll
        for (int at = 0; at < TOGETHER; at++) {
            const int first = (begin + arrival) * TOGETHER;
            const int run = RUNS == 1 ? 0 : GROUP > 64 ? run_of(first + at) - run_of(first) : at;
            Brick bricks[STACKED];
#pragma unroll
            for (int i = 0; i < STACKED; i++)
                read_brick(bricks[i], place, (warp / 4 * STACKED + i) * 4 + warp % 4, at, run, lane);
            const u64 right = block_at(inputs + at * INPUTS);
#pragma unroll
            for (int step = 0; step < 4; step += AT_ONCE) {
                u32(&mine)[AT_ONCE][STACKED][4] = pairs[(at * 4 + step) / AT_ONCE % SETS];
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
                    for (int i = 0; i < STACKED; i++) weigh(mine[k][i], bricks[i], step + k);
                pin_all();
                begin_products();
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
                    for (int i = 0; i < STACKED; i++)
                        multiply_all(sums[i], mine[k][i], right + 2 * (step + k), (arrival | at | step | k) != 0);
                commit_products();
                pin_all();
                // The next set of operands may be overwritten.
                wait_for_products<SETS - 1>();
            }
        }
    }
    wait_for_products<0>();
    pin_all();

    // All inputs and bricks have been read: the sums take their place. A thread has two adjacent tokens of every eight,
    // of two rows of a block.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < STACKED; i++)
#pragma unroll
        for (int sum = 0; sum < TOKENS / 2; sum++) {
            const int token = sum / 4 * 8 + lane % 4 * 2 + sum % 2, of = warp / 4 * STACKED + i;
            int row = warp % 4 * 16 + sum / 2 % 2 * 8 + lane / 4;
            // Gate rows of all blocks first, then up rows.
            row = GATED ? row / 32 * OUTPUTS + of * 32 + row % 32 : of * 64 + row;
            write_word(shared + (token * SUM_PITCH + row) * 4, __float_as_uint(sums[i][sum]));
        }
    meet<SPLITS>(true);
    for (int i = threadIdx.x; i < SHARE * QUADS; i += THREADS) {
        const int token = part * SHARE + i / QUADS, row = i % QUADS * 4, column = tile * OUTPUTS + row;
        if (token >= tokens || column >= width) continue;
        const u32 from = shared + (token * SUM_PITCH + row) * 4;
        float4 parts[SPLITS], up_parts[SPLITS], sum = {}, up = {};
#pragma unroll
        for (int program = 0; program < SPLITS; program++) {
            parts[program] = read_from<SPLITS>(program, from);
            if (GATED) up_parts[program] = read_from<SPLITS>(program, from + OUTPUTS * 4);
        }
#pragma unroll
        for (int program = 0; program < SPLITS; program++) {
            add_to(sum, parts[program]);
            if (GATED) add_to(up, up_parts[program]);
        }
        put(outputs, factors, sum, up, token, column);
    }
    // The sums of a program that has ended are not readable.
    if (SPLITS > 1) meet<SPLITS>(false);
}
