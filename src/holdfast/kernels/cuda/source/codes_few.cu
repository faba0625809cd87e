// out = activation(x w^T + bias) for up to 16 tokens with weights of 4 or 8 bits.
//
// A program takes a few slabs of 16 rows and all columns. Its warps take every WARPS-th brick, load it DEEP bricks ahead
// into registers and the inputs by way of the L1 cache, and add their sums in the end. Scales multiply the sums of a
// group, in float32. With EXPERTS a program takes its rows of one expert for one block of picks.
//
// Compiled with `codes.cu` before it.

// The same where nothing was added yet.
__device__ __forceinline__ void multiply_first(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// Add a brick by its inputs, `given[tile][step]`, to the sums; scales multiply the sums of a group.
__device__ __forceinline__ void add_brick(float (&sums)[TILES][4], const Brick& brick, const u32 (&given)[TILES][4][2]) {
    float parts[TILES][4];
#pragma unroll
    for (int step = 0; step < 4; step++) {
        u32 pairs[4];
        operand(pairs, brick, step);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            if (step % STEPS == 0) multiply_first(parts[tile], pairs, given[tile][step][0], given[tile][step][1]);
            else multiply(parts[tile], pairs, given[tile][step][0], given[tile][step][1]);
        }
        if (step % STEPS < STEPS - 1) continue;
        const float scales[2] = {scale_of(brick, step / STEPS, 0), scale_of(brick, step / STEPS, 1)};
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[tile][i] += parts[tile][i] * scales[i / 2];
    }
}

// A lane's inputs of 64 columns.
__device__ __forceinline__ void load_given(u32 (&to)[4][2], const u16* from) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
        if (DEALT == 4) {
            const uint2 two = *(const uint2*)(from + step * 16);
            to[step][0] = two.x, to[step][1] = two.y;
        } else if (step % 2 == 0) {
            const uint4 four = *(const uint4*)(from + step * 16);
            to[step][0] = four.x, to[step][1] = four.y, to[step + 1][0] = four.z, to[step + 1][1] = four.w;
        }
    }
}

constexpr int SLABS = GATED || TOKENS > 8 ? 2 : 1, OF_TILE = GATED ? 16 : 16 * SLABS, PITCH = 16 * SLABS + 4;
constexpr int DEEP = 8 / (SLABS * PIECES);

extern "C" __global__ void __launch_bounds__(THREADS, BESIDE)
    narrow(const u16* x, const char* codes, const char* scales, const char* zeros, const float* factors,
           const u16* bias, void* out, const int* order, const int* block_expert, const float* shares, int tokens,
           int width, int depth, int stride, int divide, int row_blocks) {
    __shared__ float added[WARPS][TOKENS][PITCH];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = depth / 64;
    const int programs = (width + OF_TILE - 1) / OF_TILE, tile = blockIdx.x % programs;
    const Weight weight = weight_of(codes, scales, zeros, factors, depth);
    Outputs outputs = {bias, out, nullptr, shares, tokens, width};
    // The up rows of a block lie two slabs behind its gate rows.
    int first = GATED ? tile / 2 * 4 + tile % 2 : tile * SLABS;
    launch_next();
    if (EXPERTS) {
        wait_for_inputs();
        const int block = blockIdx.x / programs, expert = block_expert[block];
        if (expert < 0) return;
        choose(outputs, factors, expert, order + block * TOKENS, lane);
        first += expert * row_blocks * 4;
    }
    Slab slabs[SLABS];
#pragma unroll
    for (int i = 0; i < SLABS; i++) slabs[i] = slab_of(weight, first + i * (GATED ? 2 : 1), lane);
    Brick bricks[DEEP][SLABS];
    auto load = [&](Brick (&to)[SLABS], int block) {
        if (block >= blocks) return;
#pragma unroll
        for (int i = 0; i < SLABS; i++) load_brick(to[i], slabs[i], block);
    };
#pragma unroll
    for (int i = 0; i < DEEP; i++) load(bricks[i], warp + i * WARPS);
    if (!EXPERTS) wait_for_inputs();

    const u16* rows[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const int token = i * 8 + lane / 4;
        rows[i] = nullptr;
        if (token < outputs.tokens)
            rows[i] = x + (size_t)(EXPERTS ? outputs.picks[token] / divide : token) * stride + lane % 4 * DEALT;
    }
    u32 given[2][TILES][4][2] = {};
    auto load_x = [&](u32 (&to)[TILES][4][2], int block) {
        if (block >= blocks) return;
#pragma unroll
        for (int i = 0; i < TILES; i++)
            if (rows[i]) load_given(to[i], rows[i] + block * 64);
    };
    float sums[SLABS][TILES][4] = {};
    load_x(given[0], warp);
    for (int begin = warp; begin < blocks; begin += DEEP * WARPS) {
#pragma unroll
        for (int i = 0; i < DEEP; i++) {
            const int block = begin + i * WARPS;
            if (block < blocks) {
                load_x(given[(i + 1) % 2], block + WARPS);
#pragma unroll
                for (int slab = 0; slab < SLABS; slab++) add_brick(sums[slab], bricks[i][slab], given[i % 2]);
                load(bricks[i], block + DEEP * WARPS);
            }
        }
    }
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
        for (int i = 0; i < 4 * TILES; i++) {
            const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, row = slab * 16 + i / 2 % 2 * 8 + lane / 4;
            added[warp][token][row] = sums[slab][i / 4][i % 4];
        }
    __syncthreads();
    constexpr int FOURS = OF_TILE / 4;
    for (int i = threadIdx.x; i < outputs.tokens * FOURS; i += THREADS) {
        const int token = i / FOURS, row = i % FOURS * 4, column = tile * OF_TILE + row;
        float4 sum = {}, up = {};
#pragma unroll
        for (int part = 0; part < WARPS; part++) {
            add_to(sum, *(const float4*)&added[part][token][row]);
            if (GATED) add_to(up, *(const float4*)&added[part][token][16 + row]);
        }
        if (column < width) put(outputs, factors, sum, up, token, column);
    }
}
