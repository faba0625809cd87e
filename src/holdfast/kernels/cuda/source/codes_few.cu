// out = activation(x w^T + bias) for up to 16 tokens with weights of 4 or 8 bits.
//
// A program takes a few slabs of 16 rows and all columns. Its warps take every WARPS-th brick, load it DEEP bricks ahead
// into registers and the inputs into shared memory, and add their sums in the end. Scales multiply the sums of a group,
// in float32. With EXPERTS a program takes its rows of one expert for one block of picks.
//
// Compiled with `codes.cu` before it.

// Inputs of a warp in shared memory: 64 columns of all tokens, in lines of 128 bytes. Odd tokens have the halves of a line
// swapped, so that the lanes of a load read from all banks.
constexpr u32 LINE = 128, GIVEN = TOKENS * LINE;

// A lane's inputs of a token: eight neighbours of two steps at a time, or four of one. `from` is the line, `half` the one
// that has the first step.
__device__ __forceinline__ void read_given(u32 (&to)[4][2], u32 from, u32 half, int quarter) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
        const u32 at = from + (half ^ step / 2 * 64);
        if (DEALT == 4) {
            const u32 four = at + step % 2 * 32 + quarter * 8;
            to[step][0] = read_word(four), to[step][1] = read_word(four + 4);
        } else if (step % 2 == 0) {
            const uint4 four = read_four(at + quarter * 16);
            to[step][0] = four.x, to[step][1] = four.y, to[step + 1][0] = four.z, to[step + 1][1] = four.w;
        }
    }
}

constexpr int SLABS = GATED || TOKENS > 8 ? 2 : 1, OF_TILE = GATED ? 16 : 16 * SLABS, PITCH = 16 * SLABS + 4;
constexpr int DEEP = 8 / (SLABS * PIECES), PASS = DEEP * WARPS;  // bricks of a warp, and of all, that are loaded ahead
constexpr bool REGULAR = WARPS % RUN == 0 || RUN >= 1 << 10;      // so many bricks further are so many runs further

extern "C" __global__ void __launch_bounds__(THREADS, BESIDE)
    narrow(const u16* x, const char* codes, const char* scales, const char* zeros, const float* factors,
           const u16* bias, void* out, const int* order, const int* block_expert, const float* shares, int tokens,
           int width, int depth, int stride, int divide, int row_blocks) {
    extern __shared__ char memory[];
    const u32 shared = (u32)__cvta_generic_to_shared(memory);
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
        choose(outputs, factors, expert, order + block * TOKENS);
        outputs.tokens = count_real(outputs.picks, lane);
        if (expert < 0) return;
        first += expert * row_blocks * 4;
    }
    // Where a lane finds its part of this warp's first brick of a pass.
    Slab slabs[SLABS];
#pragma unroll
    for (int i = 0; i < SLABS; i++)
        slabs[i] = further(slab_of(weight, first + i * (GATED ? 2 : 1), lane), warp, REGULAR ? warp / RUN : 0);
    Brick bricks[DEEP][SLABS];
    auto load = [&](int place, int block) {
        if (block >= blocks) return;
#pragma unroll
        for (int i = 0; i < SLABS; i++)
            load_brick(bricks[place][i], further(slabs[i], place * WARPS, (REGULAR ? place * WARPS : block) / RUN));
    };
#pragma unroll
    for (int i = 0; i < DEEP; i++) load(i, warp + i * WARPS);
    if (!EXPERTS) wait_for_inputs();

    // A lane copies 16 bytes of every fourth token.
    const u32 ring = shared + warp * DEEP * GIVEN;
    const u32 to = ring + lane / 8 * LINE + (lane % 8 ^ lane / 8 % 2 * 4) * 16;
    const u16* rows[TOKENS / 4];
#pragma unroll
    for (int i = 0; i < TOKENS / 4; i++) {
        const int token = lane / 8 + 4 * i, row = token >= outputs.tokens ? 0 : EXPERTS ? outputs.picks[token] / divide : token;
        rows[i] = x + (size_t)row * stride + warp * 64 + lane % 8 * 8;
    }
    auto copy = [&](int place, int block) {
#pragma unroll
        for (int i = 0; i < TOKENS / 4; i++)
            copy_in(to + place * GIVEN + i * 4 * LINE, rows[i] + place * WARPS * 64,
                    block < blocks && lane / 8 + 4 * i < outputs.tokens);
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i < DEEP; i++) copy(i, warp + i * WARPS);
    const u32 line = ring + lane / 4 * LINE, half = lane / 4 % 2 * 64;
    float sums[SLABS][TILES][4] = {};
    for (int begin = warp; begin < blocks; begin += PASS) {
#pragma unroll
        for (int i = 0; i < SLABS; i++) slabs[i] = further(slabs[i], PASS, REGULAR ? PASS / RUN : 0);
#pragma unroll
        for (int i = 0; i < TOKENS / 4; i++) rows[i] += PASS * 64;
#pragma unroll
        for (int i = 0; i < DEEP; i++) {
            const int block = begin + i * WARPS;
            if (block >= blocks) break;
            wait_for_copies<DEEP - 1>();
            __syncwarp();
            u32 given[TILES][4][2];
#pragma unroll
            for (int at = 0; at < TILES; at++) read_given(given[at], line + i * GIVEN + at * 8 * LINE, half, lane % 4);
            __syncwarp();
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++) add_brick(sums[slab], bricks[i][slab], given);
            load(i, block + PASS);
            copy(i, block + PASS);
        }
    }
    // The sums take the place of the inputs, once all warps have read theirs.
    __syncthreads();
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
        for (int i = 0; i < 4 * TILES; i++) {
            const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, row = slab * 16 + i / 2 % 2 * 8 + lane / 4;
            write_word(shared + ((warp * TOKENS + token) * PITCH + row) * 4, __float_as_uint(sums[slab][i / 4][i % 4]));
        }
    __syncthreads();
    constexpr int FOURS = OF_TILE / 4;
    for (int i = threadIdx.x; i < outputs.tokens * FOURS; i += THREADS) {
        const int token = i / FOURS, row = i % FOURS * 4, column = tile * OF_TILE + row;
        float4 sum = {}, up = {};
#pragma unroll
        for (int part = 0; part < WARPS; part++) {
            const u32 from = shared + ((part * TOKENS + token) * PITCH + row) * 4;
            add_to(sum, read(from));
            if (GATED) add_to(up, read(from + 16 * 4));
        }
        if (column < width) put(outputs, factors, sum, up, token, column);
    }
}
