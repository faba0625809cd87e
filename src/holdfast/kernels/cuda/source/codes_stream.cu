// The products of experts with at most eight picks in a block: a program takes every so many'th of `count` tiles, one
// after another.
//
// A tile is one or two slabs of 16 rows of an expert and all columns, for one block of picks. The last warp has the copy
// engine bring the bricks, scales and inputs of the next columns into a ring of places, also of tiles that follow, so that
// memory never waits for the end of a tile. The other warps take every WARPS-th brick and add their sums in the end.
// Scales multiply the sums of a group, in float32.
//
// Compiled with `codes.cu` before it, and ROOM defined, the bytes of the ring.

constexpr int SLABS = GATED ? 2 : 1, OF_TILE = 16, PITCH = 16 * SLABS + 4;
// Bricks of a warp, and blocks of columns, that arrive together; runs of scales of a slab among them.
constexpr int PER_WARP = SLABS > 1 || WIDE ? 1 : 2, TOGETHER = PER_WARP * WARPS;
constexpr int RUNS = TOGETHER % RUN == 0 ? TOGETHER / RUN : RUN % TOGETHER == 0 ? 1 : TOGETHER / RUN + 2;
constexpr u32 RUN_BYTES = 8 * SMALL, ZERO_BYTES = ZEROS ? 8 * SMALL_ZEROS : 0;
// A place has the codes, scales and zero points of each slab, then a line of inputs for each pick. Neighbouring lines begin
// in other halves of the banks.
constexpr u32 CODES_BYTES = TOGETHER * BRICK, SCALES_AT = SLABS * CODES_BYTES;
constexpr u32 ZEROS_AT = SCALES_AT + SLABS * RUNS * RUN_BYTES, INPUTS_AT = ZEROS_AT + SLABS * RUNS * ZERO_BYTES;
constexpr u32 LINE = TOGETHER * 128 + 64;
constexpr u32 SUM_BYTES = WARPS * TOKENS * PITCH * 4;  // sums of two tiles lie apart
constexpr int PLACES_MOST = 8;
static_assert(EXPERTS && TOKENS == 8, "picks of experts, one tile of the instruction");

// Copy a run of memory; it arrives at a barrier.
__device__ __forceinline__ void fetch_run(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
        "r"(bytes), "r"(barrier)
        : "memory");
}

// The warps that multiply.
__device__ __forceinline__ void meet_readers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// A place of the ring, and the parity of its round.
struct Turn {
    int place = 0, round = 0;

    __device__ __forceinline__ void pass(int places) {
        if (++place == places) place = 0, round ^= 1;
    }
};

// The expert of a tile's picks, -1 past the last, and a lane's pick.
struct Chosen {
    int expert, pick;
};

__device__ __forceinline__ Chosen chosen_for(int tile, int count, int tiles, const int* block_expert, const int* order,
                                             int lane) {
    if (tile >= count) return {-1, -1};
    const int block = tile / tiles;
    return {block_expert[block], lane < TOKENS ? order[block * TOKENS + lane] : -1};
}

// A lane's inputs in a block: eight neighbours of two steps at a time, or four of one.
__device__ __forceinline__ void read_given(u32 (&to)[4][2], u32 from) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
        if (DEALT == 4) {
            to[step][0] = read_word(from + step * 32), to[step][1] = read_word(from + step * 32 + 4);
        } else if (step % 2 == 0) {
            const uint4 four = read_four(from + step * 32);
            to[step][0] = four.x, to[step][1] = four.y, to[step + 1][0] = four.z, to[step + 1][1] = four.w;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, BESIDE)
    stream(const u16* x, const char* codes, const char* scales, const char* zeros, const float* factors,
           const u16* bias, void* out, const int* order, const int* block_expert, const float* shares, int picks,
           int width, int depth, int stride, int divide, int row_blocks, int count) {
    extern __shared__ char memory[];
    const u32 shared = ((u32)__cvta_generic_to_shared(memory) + 127) & ~127u;
    const u32 barriers = shared + 2 * SUM_BYTES, ring = barriers + 16 * PLACES_MOST;
    const u32 place_bytes = INPUTS_AT + min(picks, TOKENS) * LINE + 127 & ~127u;
    const int places = min(ROOM / (int)place_bytes, PLACES_MOST);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = depth / 64;
    const int tiles = (width + OF_TILE - 1) / OF_TILE;
    const Weight weight = weight_of(codes, scales, zeros, factors, depth);
    if (threadIdx.x == THREADS) set_up_ring(barriers, places, WARPS);
    launch_next();
    __syncthreads();
    wait_for_inputs();
    Turn turn;
    Chosen next = chosen_for(blockIdx.x, count, tiles, block_expert, order, lane);

    if (warp == WARPS) {
        bool again = false;  // places have been in use
        for (int tile = blockIdx.x; next.expert >= 0; tile += gridDim.x) {
            const Chosen now = next;
            next = chosen_for(tile + gridDim.x, count, tiles, block_expert, order, lane);
            const int real = __popc(__ballot_sync(~0u, now.pick >= 0)), local = tile % tiles, of = lane % SLABS;
            const u16* row = x + (size_t)(now.pick < 0 ? 0 : now.pick / divide) * stride;
            // The up rows of a block lie two slabs behind its gate rows.
            const size_t slab = (size_t)now.expert * row_blocks * 4 + (GATED ? local / 2 * 4 + local % 2 + 2 * of : local);
            for (int first = 0; first < blocks; first += TOGETHER, turn.pass(places)) {
                const u32 barrier = barriers + 16 * turn.place, place = ring + turn.place * place_bytes;
                const int here = min(TOGETHER, blocks - first), run = first / RUN, runs = (first + here - 1) / RUN + 1 - run;
                if (again) wait(barrier + 8, turn.round ^ 1);
                if (lane == 0)
                    expect(barrier, SLABS * (here * BRICK + runs * (RUN_BYTES + ZERO_BYTES)) + real * here * 128);
                __syncwarp();
                const size_t of_runs = slab * weight.groups + run;
                if (lane / SLABS == 0)
                    fetch_run(place + of * CODES_BYTES, weight.codes + (slab * blocks + first) * BRICK, here * BRICK, barrier);
                if (lane / SLABS == 1)
                    fetch_run(place + SCALES_AT + of * RUNS * RUN_BYTES, weight.scales + of_runs * RUN_BYTES,
                              runs * RUN_BYTES, barrier);
                if (ZEROS && lane / SLABS == 2)
                    fetch_run(place + ZEROS_AT + of * RUNS * ZERO_BYTES, weight.zeros + of_runs * ZERO_BYTES,
                              runs * ZERO_BYTES, barrier);
                if (lane < real) fetch_run(place + INPUTS_AT + lane * LINE, row + first * 64, here * 128, barrier);
                again |= turn.place + 1 == places;
            }
        }
        return;
    }

    for (int tile = blockIdx.x, done = 0; next.expert >= 0; tile += gridDim.x, done++) {
        const Chosen now = next;
        next = chosen_for(tile + gridDim.x, count, tiles, block_expert, order, lane);
        const int real = __popc(__ballot_sync(~0u, now.pick >= 0));
        // Picks that do not exist have the inputs of the last one: their sums are not used.
        const u32 line = INPUTS_AT + min(lane / 4, real - 1) * LINE + warp * 128 + lane % 4 * DEALT * 2;
        float sums[SLABS][TILES][4] = {};
        for (int first = 0; first < blocks; first += TOGETHER, turn.pass(places)) {
            const u32 barrier = barriers + 16 * turn.place, place = ring + turn.place * place_bytes;
            wait(barrier, turn.round);
#pragma unroll
            for (int i = 0; i < PER_WARP; i++) {
                const int brick = i * WARPS + warp;
                if (first + brick >= blocks) break;
                const int run = TOGETHER % RUN == 0 ? brick / RUN : (first + brick) / RUN - first / RUN;
                u32 given[TILES][4][2];
                read_given(given[0], place + line + i * WARPS * 128);
#pragma unroll
                for (int slab = 0; slab < SLABS; slab++) {
                    Brick one;
#pragma unroll
                    for (int piece = 0; piece < PIECES; piece++)
                        one.codes[piece] = read_four(place + slab * CODES_BYTES + brick * BRICK + piece * 512 + lane * 16);
                    const u32 of_lane = (slab * RUNS + run) * 8 + lane / 4;
                    read_small<SMALL>(one.scales, place + SCALES_AT + of_lane * SMALL);
                    if (ZEROS) read_small<SMALL_ZEROS>(one.zeros, place + ZEROS_AT + of_lane * SMALL_ZEROS);
                    add_brick(sums[slab], one, given);
                }
            }
            __syncwarp();
            if (lane == 0) arrive(barrier + 8);
        }
        const u32 added = shared + done % 2 * SUM_BYTES;
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int pick = lane % 4 * 2 + i % 2, row = slab * 16 + i / 2 * 8 + lane / 4;
                const u32 to = added + ((warp * TOKENS + pick) * PITCH + row) * 4;
                if (pick < real) write_word(to, __float_as_uint(sums[slab][0][i]));
            }
        meet_readers();
        Outputs outputs = {bias, out, nullptr, shares, real, width};
        const float* of_rows = factors;
        choose(outputs, of_rows, now.expert, order + tile / tiles * TOKENS);
        constexpr int FOURS = OF_TILE / 4;
        // Warps take turns, so that none falls behind.
        for (int i = (threadIdx.x + done * 32) % THREADS; i < real * FOURS; i += THREADS) {
            const int pick = i / FOURS, row = i % FOURS * 4, column = tile % tiles * OF_TILE + row;
            float4 sum = {}, up = {};
#pragma unroll
            for (int part = 0; part < WARPS; part++) {
                const u32 from = added + ((part * TOKENS + pick) * PITCH + row) * 4;
                add_to(sum, read(from));
                if (GATED) add_to(up, read(from + 16 * 4));
            }
            if (column < width) put(outputs, of_rows, sum, up, pick, column);
        }
    }
}
