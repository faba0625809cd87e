// out = activation(x w^T + bias) for up to 192 tokens, on Hopper, bound by reading the weight.
//
// A program takes ROWS rows of the weight (for a gated activation half of them from each half) and one of SPLITS parts
// of their depth (split-K). One producer thread has the copy engine (TMA) load 64 columns of them and of x at a time
// into a ring of STAGES stages; GROUPS warp groups, each with BLOCKS blocks of 64 tokens, multiply a full stage and
// release it. Programs that share a tile form a cluster and reduce through distributed shared memory.
//
// wgmma reads both operands from shared memory, 64 rows of the first and up to 256 of the second. So for a tile of 64
// weight rows and more tokens, the operands are swapped (TURNED): the weight is the first operand and all tokens are
// the second. This reads less shared memory, which saves power, and a GPU under load is power-limited.
//
// Weights do not depend on preceding kernels, so the ring is full of them before those have ended. They are read once,
// with the L2 policy evict-first, so that x stays in the L2 cache: without it a layer of an 8B model takes 10% longer.
//
// `products.py` compiles this file with GROUPS, BLOCKS, ROWS, SPLITS, TURNED, STAGES and ACTIVATION defined, and with
// `hopper.cu`, `projection.cu` and `multiply` before it: one wgmma, d[64 x N] (+)= a[64 x 16] b[N x 16]^T, N being
// ROWS, or all tokens.

constexpr int TOKENS = 64 * BLOCKS * GROUPS, DEPTH = 64, WARPS = 4 * GROUPS;
constexpr int OUTPUTS = GATED ? ROWS / 2 : ROWS;  // columns of `out` that a tile makes
constexpr u32 LINE = DEPTH * 2;                   // bytes of a row in a stage; the 128-byte swizzle relies on it
constexpr u32 INPUT_BYTES = TOKENS * LINE, WEIGHT_BYTES = ROWS * LINE, PLACE = INPUT_BYTES + WEIGHT_BYTES;
constexpr int PITCH = ROWS + (TURNED ? 4 : 8);  // floats per token in the reduction; padded against bank conflicts
constexpr int PRODUCTS = TURNED ? 1 : BLOCKS;   // of a group at a time, each with SUMS results of a thread
constexpr int SUMS = (TURNED ? TOKENS : ROWS) / 2;

// Programs that share a tile each finish a part of its tokens: a thread has four columns of one token at a time.
constexpr int SHARE = TOKENS / SPLITS, QUADS = OUTPUTS / 4, WORK = SHARE * QUADS;
constexpr int TURNS = (WORK + 128 * GROUPS - 1) / (128 * GROUPS);

static_assert(ROWS % 16 == 0 || (!GATED && ROWS % 8 == 0), "outputs come in eights");
static_assert(!TURNED || (ROWS == 64 && GROUPS == 1 && SPLITS > 1), "one group has all rows of a shared tile");
static_assert(SPLITS == 1 || TOKENS * PITCH * 4 <= STAGES * PLACE, "parts are added up where the ring was");

__device__ __forceinline__ void fetch_once(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 once) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(once)
        : "memory");
}

// `width` is that of `out`; a gated weight has twice as many rows. `input_bytes` is what a fetch of x brings: its rows
// past the tokens are never stored, so their contents do not matter.
extern "C" __global__ void __launch_bounds__(128 * GROUPS + 32, 1)
    product(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, const u16* bias, u16* out,
            int tokens, int width, int depth, int input_bytes) {
    extern __shared__ char memory[];
    const u32 ring = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u, barriers = ring + STAGES * PLACE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = blockIdx.x % SPLITS, column = blockIdx.x / SPLITS * OUTPUTS;
    const int blocks = depth / DEPTH, begin = blocks * part / SPLITS, steps = blocks * (part + 1) / SPLITS - begin;

    if (warp == WARPS && lane == 0) set_up_ring(barriers, STAGES, WARPS);
    launch_next();
    __syncthreads();

    if (warp == WARPS) {
        if (lane == 0) {
            look_up(&x);
            const u64 once = read_once();
            const int ahead = steps < STAGES ? steps : STAGES;
            auto fetch_weight = [&](int step) {
                const u32 barrier = barriers + 16 * (step % STAGES), to = ring + step % STAGES * PLACE + INPUT_BYTES;
                const int from = (begin + step) * DEPTH;
                expect(barrier, WEIGHT_BYTES + input_bytes);
                fetch_once(to, &weight, from, column, barrier, once);
                if (GATED) fetch_once(to + WEIGHT_BYTES / 2, &weight, from, width + column, barrier, once);
            };
            for (int step = 0; step < ahead; step++) fetch_weight(step);
            wait_for_inputs();
            for (int step = 0; step < steps; step++) {
                const u32 barrier = barriers + 16 * (step % STAGES);
                if (step >= ahead) {
                    wait(barrier + 8, (step / STAGES & 1) ^ 1);
                    fetch_weight(step);
                }
                fetch(ring + step % STAGES * PLACE, &x, (begin + step) * DEPTH, 0, barrier);
            }
        }
        __syncwarp();
        if (SPLITS > 1) {
            meet<SPLITS>(false);
            meet<SPLITS>(false);
        }
        return;
    }

    float sums[PRODUCTS][SUMS];
    auto pin_all = [&]() {
#pragma unroll
        for (int block = 0; block < PRODUCTS; block++) pin(sums[block]);
    };
    for (int step = 0; step < steps; step++) {
        const u32 barrier = barriers + 16 * (step % STAGES), place = ring + step % STAGES * PLACE;
        wait(barrier, step / STAGES & 1);
        const u32 inputs = place + warp / 4 * BLOCKS * 64 * LINE, weights = place + INPUT_BYTES;
        const u64 left = block_at(TURNED ? weights : inputs), right = block_at(TURNED ? inputs : weights);
        pin_all();
        begin_products();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++)
#pragma unroll
            for (int block = 0; block < PRODUCTS; block++)
                multiply(sums[block], left + 2 * k + block * (64 * LINE >> 4), right + 2 * k, (step | k) != 0);
        commit_products();
        pin_all();
        // All but the last product are done, so the previous stage is free.
        wait_for_products<1>();
        if (step > 0 && lane == 0) arrive(barriers + 16 * ((step - 1) % STAGES) + 8);
    }
    wait_for_products<0>();
    pin_all();

    // A thread has two adjacent columns of every eight, of two tokens of each block.
    const int within = lane % 4 * 2;
    auto token_of = [&](int half) {
        return (warp / 4 * BLOCKS + half / 2) * 64 + warp % 4 * 16 + lane / 4 + half % 2 * 8;
    };
    if (SPLITS == 1) {
#pragma unroll
        for (int half = 0; half < 2 * BLOCKS; half++) {
            const int token = token_of(half);
            const float(&mine)[SUMS] = sums[half / 2];
            if (token >= tokens) continue;
            u16* line = out + (size_t)token * width;
#pragma unroll
            for (int i = 0; i < OUTPUTS / 8; i++) {
                const int at = column + 8 * i + within, sum = 4 * i + half % 2 * 2;
                const int up = GATED ? sum + OUTPUTS / 2 : sum;
                if (column + 8 * i >= width) continue;
                *(u32*)(line + at) = pair_of(finished(mine[sum], mine[up], bias, at, width),
                                             finished(mine[sum + 1], mine[up + 1], bias, at + 1, width));
            }
        }
        return;
    }
    // Once all groups have arrived the ring is unused: each program stores its sums there, and finishes its part of
    // the tokens.
    asm volatile("bar.sync 1, %0;" ::"n"(128 * GROUPS) : "memory");
    if (TURNED) {
        // A thread has two adjacent tokens of every eight, of two rows.
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const int token = i / 4 * 8 + within + i % 2, of = warp * 16 + lane / 4 + i / 2 % 2 * 8;
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(ring + (token * PITCH + of) * 4), "f"(sums[0][i]) : "memory");
        }
    } else {
#pragma unroll
        for (int half = 0; half < 2 * BLOCKS; half++) {
            const u32 line = ring + (token_of(half) * PITCH + within) * 4;
            const float(&mine)[SUMS] = sums[half / 2 % PRODUCTS];
#pragma unroll
            for (int i = 0; i < ROWS / 8; i++)
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(line + 32 * i),
                             "f"(mine[4 * i + half % 2 * 2]), "f"(mine[4 * i + half % 2 * 2 + 1])
                             : "memory");
        }
    }
    meet<SPLITS>(true);
    // All remote loads are issued before any result is used. Unused values are not loaded: nothing would wait for
    // them, and the memory of a program that has ended is not readable.
    float4 gates[TURNS][SPLITS], ups[TURNS][SPLITS];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int i = threadIdx.x + turn * 128 * GROUPS;
        const int at = part * SHARE + i / QUADS, to = column + i % QUADS * 4;
        const u32 address = ring + (at * PITCH + i % QUADS * 4) * 4;
        if (i >= WORK || at >= tokens || to >= width) continue;
#pragma unroll
        for (int program = 0; program < SPLITS; program++) {
            gates[turn][program] = read_from<SPLITS>(program, address);
            if (GATED) ups[turn][program] = read_from<SPLITS>(program, address + OUTPUTS * 4);
        }
    }
    auto total = [](const float4 (&parts)[SPLITS]) {
        float4 sum = parts[0];
#pragma unroll
        for (int program = 1; program < SPLITS; program++) {
            const float4 more = parts[program];
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        return sum;
    };
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int i = threadIdx.x + turn * 128 * GROUPS;
        const int at = part * SHARE + i / QUADS, to = column + i % QUADS * 4;
        if (i >= WORK || at >= tokens || to >= width) continue;
        const float4 gate = total(gates[turn]), up = GATED ? total(ups[turn]) : gate;
        *(uint2*)(out + (size_t)at * width + to) = four_of(gate, up, bias, to, width);
    }
    meet<SPLITS>(false);
}
