// The same for more picks of an expert: a program takes ROW_WARPS times 64 rows of one expert for one block of picks; its
// K_WARPS warps along the depth take 64 columns each, of inputs that ROW_WARPS of them share. Scales multiply the weights,
// in bfloat16.
//
// Compiled with `codes.cu` before it.

constexpr int ROWS = 64 * ROW_WARPS, OUTPUTS = GATED ? ROWS / 2 : ROWS, QUADS = OUTPUTS / 4;
constexpr int X_PITCH = TOKENS > 32 ? 72 : 96, SUM_PITCH = ROWS + 4;  // 96: rows of eight lanes apart in all banks
constexpr u32 X_STAGE = TOKENS * X_PITCH * 2;

__device__ __forceinline__ u32 twice(float value) { return pair_of(value, value); }

// The warps that share inputs: those of one block of columns.
__device__ __forceinline__ void meet(int of_depth) {
    if (ROW_WARPS == 1) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(of_depth + 1), "n"(32 * ROW_WARPS) : "memory");
}

typedef float Sums[4][TILES][4];  // of four slabs

// Add four slabs of a block by its inputs to the sums.
__device__ __forceinline__ void multiply_block(Sums& sums, const Brick (&bricks)[4], u32 inputs, int lane) {
#pragma unroll
    for (int two = 0; two < 2; two++) {
        uint4 given[TILES];  // of two steps
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const u32 at = inputs + ((tile * 8 + lane / 4) * X_PITCH + lane % 4 * DEALT + two * 32) * 2;
            if (DEALT == 8) given[tile] = read_four(at);
            else given[tile] = {read_word(at), read_word(at + 4), read_word(at + 32), read_word(at + 36)};
        }
#pragma unroll
        for (int slab = 0; slab < 4; slab++)
#pragma unroll
            for (int step = 2 * two; step < 2 * two + 2; step++) {
                u32 pairs[4];
                operand(pairs, bricks[slab], step);
                const u32 scale = twice(scale_of(bricks[slab], step / STEPS, 0));
                const u32 second = twice(scale_of(bricks[slab], step / STEPS, 1));
#pragma unroll
                for (int i = 0; i < 4; i++) pairs[i] = times(pairs[i], i % 2 ? second : scale);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    multiply(sums[slab][tile], pairs, step % 2 ? given[tile].z : given[tile].x,
                             step % 2 ? given[tile].w : given[tile].y);
            }
    }
}

// The inputs of a block of columns, one row a token; tokens that do not exist are zeros.
__device__ __forceinline__ void load_inputs(u32 to, const u16* const (&rows)[TOKENS / (4 * ROW_WARPS)], int block,
                                            int thread) {
#pragma unroll
    for (int i = 0; i < TOKENS / (4 * ROW_WARPS); i++) {
        const int token = i * 4 * ROW_WARPS + thread / 8;
        copy_in(to + (token * X_PITCH + thread % 8 * 8) * 2, rows[i] + (rows[i] ? block * 64 + thread % 8 * 8 : 0),
                rows[i] != nullptr);
    }
    commit_copies();
}

// Store the sums of all warps, then hand the sum of each quad of outputs to `each(token, row, sum, up)`.
template <typename Each>
__device__ __forceinline__ void add_up(Sums& sums, u32 memory, int tokens, Each each) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, of_rows = warp / K_WARPS, of_depth = warp % K_WARPS;
    __syncthreads();
#pragma unroll
    for (int slab = 0; slab < 4; slab++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = tile * 8 + lane % 4 * 2 + i % 2;
                int row = slab * 16 + i / 2 * 8 + lane / 4;
                // Gate rows of all blocks first, then up rows.
                row = GATED ? slab / 2 * OUTPUTS + of_rows * 32 + row % 32 : of_rows * 64 + row;
                const u32 to = memory + ((of_depth * TOKENS + token) * SUM_PITCH + row) * 4;
                write_word(to, __float_as_uint(sums[slab][tile][i]));
            }
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * QUADS; i += THREADS) {
        const int token = i / QUADS, row = i % QUADS * 4;
        float4 sum = {}, up = {};
#pragma unroll
        for (int part = 0; part < K_WARPS; part++) {
            const u32 from = memory + ((part * TOKENS + token) * SUM_PITCH + row) * 4;
            add_to(sum, read(from));
            if (GATED) add_to(up, read(from + OUTPUTS * 4));
        }
        each(token, row, sum, up);
    }
}

constexpr bool TWO_AHEAD = TOKENS <= 32 && !WIDE;

extern "C" __global__ void __launch_bounds__(THREADS, BESIDE)
    picks(const u16* x, const char* codes, const char* scales, const char* zeros, const float* factors, const u16* bias,
          void* out, const int* order, const int* block_expert, const float* shares, int tokens, int width, int depth,
          int stride, int divide, int row_blocks) {
    extern __shared__ char memory[];
    const u32 shared = (u32)__cvta_generic_to_shared(memory), sums_at = shared + K_WARPS * 2 * X_STAGE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int of_rows = warp / K_WARPS, of_depth = warp % K_WARPS, thread = of_rows * 32 + lane;
    const int tiles = (width + OUTPUTS - 1) / OUTPUTS, tile = blockIdx.x % tiles, pick_block = blockIdx.x / tiles;
    const int blocks = depth / 64, chunks = (blocks + K_WARPS - 1) / K_WARPS;
    Weight weight = weight_of(codes, scales, zeros, factors, depth);
    Outputs outputs = {bias, out, nullptr, shares, tokens, width};
    launch_next();
    wait_for_inputs();
    const int expert = block_expert[pick_block];
    if (expert < 0) return;
    choose(outputs, weight.factors, expert, order + pick_block * TOKENS);
    outputs.tokens = count_real(outputs.picks, lane);

    // The units of columns whose inputs and whose weights are loaded next.
    int soon = 0, later = 0;
    auto load = [&](Brick (&to)[4]) {
        const int block = later++ * K_WARPS + of_depth;
        if (block >= blocks) return;
#pragma unroll
        for (int slab = 0; slab < 4; slab++) {
            const size_t at = (size_t)(expert * row_blocks + tile * ROW_WARPS + of_rows) * 4 + slab;
            load_brick(to[slab], slab_of(weight, at, lane), block);
        }
    };
    Brick even[4], odd[4];
    load(even);
    if (TWO_AHEAD) load(odd);

    const u16* rows[TOKENS / (4 * ROW_WARPS)];
#pragma unroll
    for (int i = 0; i < TOKENS / (4 * ROW_WARPS); i++) {
        const int token = i * 4 * ROW_WARPS + thread / 8;
        rows[i] = token < outputs.tokens ? x + (size_t)(outputs.picks[token] / divide) * stride : nullptr;
    }
    const u32 inputs = shared + of_depth * 2 * X_STAGE;
    auto load_x = [&] {
        const int block = soon * K_WARPS + of_depth;
        if (block < blocks) load_inputs(inputs + (soon & 1) * X_STAGE, rows, block, thread);
        soon++;
    };
    Sums sums = {};
    load_x();
    auto take = [&](Brick (&bricks)[4], int unit) {
        wait_for_copies<0>();
        meet(of_depth);
        load_x();
        if (unit * K_WARPS + of_depth < blocks) multiply_block(sums, bricks, inputs + (unit & 1) * X_STAGE, lane);
        load(bricks);
    };
    for (int unit = 0; unit < chunks; unit += 2) {
        take(even, unit);
        if (unit + 1 < chunks) take(TWO_AHEAD ? odd : even, unit + 1);
    }
    const int column = tile * OUTPUTS;
    add_up(sums, sums_at, outputs.tokens, [&](int token, int row, float4 sum, float4 up) {
        if (column + row < width) put(outputs, weight.factors, sum, up, token, column + row);
    });
}
