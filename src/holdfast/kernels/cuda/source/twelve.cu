// out = activation(x w^T + bias) for few tokens with weights packed to 12 bits, on Hopper: a quarter less to read.
//
// A bfloat16 weight has an 8-bit exponent, of which the rows of a model use 4 bits: sign, mantissa and the offset to
// the row's largest exponent take 12 bits. `twelve.py` arranges them so that a thread finds its wgmma operands of 16
// columns in three words, and unpacks two weights with three instructions.
//
// A program takes a tile of SLABS times 16 rows (for a gated activation eight of each half in a slab). One producer
// thread has the copy engine (TMA) load 64 columns of them and of x at a time into a ring of STAGES stages; GROUPS warp
// groups, a slab per warp, unpack weights in registers while the previous product runs, and multiply them by all
// tokens. If a weight has more tiles than there are programs (LOOPED), each program takes several in turn.
//
// `twelve.py` compiles this file with GROUPS, SLABS, COLUMNS (tokens, in eights), STAGES, LOOPED and ACTIVATION
// defined, and with `hopper.cu`, `projection.cu` and `multiply` before it: d[64 x COLUMNS] (+)= a[64 x 16]
// b[COLUMNS x 16]^T, with a in registers.

constexpr int DEPTH = 64, WARPS = 4 * GROUPS, THREADS = 128 * GROUPS, ROWS = 16 * SLABS;
constexpr int OF_GROUP = (SLABS + GROUPS - 1) / GROUPS;  // slabs of a group; the last group may have fewer
constexpr int OUTPUTS = GATED ? ROWS / 2 : ROWS, QUADS = OUTPUTS / 4;
constexpr u32 SLAB = 16 * DEPTH * 3 / 2, WEIGHT_BYTES = SLABS * SLAB;
constexpr u32 INPUT_BYTES = COLUMNS * DEPTH * 2, PLACE = INPUT_BYTES + (WEIGHT_BYTES + 1023) / 1024 * 1024;
constexpr int SUMS = COLUMNS / 2, PITCH = ROWS + 4;

// With many groups the producer gives its registers to the consumers (setmaxnreg).
constexpr bool LENT = GROUPS >= 3;
constexpr int REGISTERS = GROUPS == 3 ? 160 : 112;

static_assert(OF_GROUP <= 4, "a warp has one slab");
static_assert(LOOPED || COLUMNS * PITCH * 4 <= STAGES * PLACE, "sums are put where the ring was");

__device__ __forceinline__ void fetch_run(u32 to, const char* from, u32 bytes, u32 barrier, u64 once) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(once)
        : "memory");
}

// Unpack 16 columns of a slab in wgmma's register layout: two rows eight apart, two columns, then the same eight
// columns on. `lows` has the lowest exponent bits and the mantissas, byte by byte; `highs` the signs and the other
// exponent bits, those of the pairs four bits apart.
__device__ __forceinline__ void put_together(u32 (&pairs)[4], u32 address, int lane) {
    u32 lows[2], highs;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(lows[0]), "=r"(lows[1])
                 : "r"(address + 8 * lane)
                 : "memory");
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(highs) : "r"(address + 256 + 4 * lane) : "memory");
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        const u32 bytes = __byte_perm(lows[pair / 2], 0x38383838, pair % 2 ? 0x4342 : 0x4140);
        const u32 moved = pair < 3 ? highs << 4 * pair : __funnelshift_l(highs, highs, 12);
        pairs[pair] = (moved & 0x87008700) | bytes;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + (LENT ? 128 : 32), 1)
    product(const __grid_constant__ TensorMap x, const char* weight, const float* scale, const u16* bias, u16* out,
            int tokens, int width, int depth, int input_bytes) {
    extern __shared__ char memory[];
    const u32 ring = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u, barriers = ring + STAGES * PLACE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tiles = (width + OUTPUTS - 1) / OUTPUTS, steps = depth / DEPTH, begin = blockIdx.x;
    const int stride = LOOPED ? gridDim.x : tiles;

    if (warp == WARPS && lane == 0) set_up_ring(barriers, STAGES, WARPS);
    launch_next();
    __syncthreads();

    if (warp >= WARPS) {
        if (LENT) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (warp == WARPS && lane == 0) {
            look_up(&x);
            const u64 once = read_once();
            const int all = (tiles - begin + stride - 1) / stride * steps, ahead = all < STAGES ? all : STAGES;
            auto fetch_weight = [&](int step) {
                const u32 barrier = barriers + 16 * (step % STAGES), to = ring + step % STAGES * PLACE + INPUT_BYTES;
                const size_t tile = begin + step / steps * stride;
                expect(barrier, WEIGHT_BYTES + input_bytes);
                fetch_run(to, weight + (tile * steps + step % steps) * WEIGHT_BYTES, WEIGHT_BYTES, barrier, once);
            };
            for (int step = 0; step < ahead; step++) fetch_weight(step);
            wait_for_inputs();
            for (int step = 0; step < all; step++) {
                const u32 barrier = barriers + 16 * (step % STAGES);
                if (step >= ahead) {
                    wait(barrier + 8, (step / STAGES & 1) ^ 1);
                    fetch_weight(step);
                }
                fetch(ring + step % STAGES * PLACE, &x, step % steps * DEPTH, 0, barrier);
            }
        }
        return;
    }
    if (LENT) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));

    // With a gated activation, a thread's two rows belong to one output.
    const int slab = warp / 4 * OF_GROUP + warp % 4;
    const bool mine = warp % 4 < OF_GROUP && slab < SLABS;
    const int first = (GATED ? slab * 8 : slab * 16) + lane / 4, second = first + (GATED ? OUTPUTS : 8);
    const u32 sums_at = LOOPED ? barriers + (16 * STAGES + 1023) / 1024 * 1024 : ring;
    u32 even[DEPTH / 16][4] = {}, odd[DEPTH / 16][4] = {};
    float sums[SUMS];
    int done = 0;
    auto take = [&](int step, u32 (&pairs)[DEPTH / 16][4]) {
        const int place_of = (done + step) % STAGES;
        const u32 barrier = barriers + 16 * place_of, place = ring + place_of * PLACE;
        wait(barrier, (done + step) / STAGES & 1);
        if (mine) {
            const u32 from = place + INPUT_BYTES + slab * SLAB;
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) put_together(pairs[k], from + k * (SLAB / 4), lane);
        }
        const u64 inputs = block_at(place);
        pin(sums);
        begin_products();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) multiply(sums, pairs[k], inputs + 2 * k, (step | k) != 0);
        commit_products();
        pin(sums);
        // All but the last product are done, so the previous stage and its registers are free.
        wait_for_products<1>();
        if (step > 0 && lane == 0) arrive(barriers + 16 * ((done + step - 1) % STAGES) + 8);
    };
    for (int tile = begin; tile < tiles; tile += stride) {
        const int column = tile * OUTPUTS, of_first = column + first;
        const int of_second = GATED ? width + of_first : of_first + 8;
        const bool inside = mine && of_first < width;
        const float scales[2] = {inside ? scale[of_first] : 0.0f,
                                 inside && (GATED || of_second < width) ? scale[of_second] : 0.0f};
        int step = 0;
        for (; step + 1 < steps; step += 2) {
            take(step, even);
            take(step + 1, odd);
        }
        if (step < steps) take(step, even);
        wait_for_products<0>();
        pin(sums);
        if (LOOPED) {
            done += steps;
            if (lane == 0) arrive(barriers + 16 * ((done - 1) % STAGES) + 8);
        }

        // Once all groups have arrived the ring (or the previous tile's sums) is unused: sums are stored there,
        // token by token, and a thread finishes four outputs of one token at a time.
        asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
        if (mine) {
#pragma unroll
            for (int i = 0; i < SUMS; i++) {
                const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, half = i / 2 % 2;
                const u32 to = sums_at + (token * PITCH + (half ? second : first)) * 4;
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(sums[i] * scales[half]) : "memory");
            }
        }
        asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
#pragma unroll 4
        for (int i = threadIdx.x; i < tokens * QUADS; i += THREADS) {
            const int token = i / QUADS, within = i % QUADS * 4;
            if (column + within >= width) continue;
            const u32 from = sums_at + (token * PITCH + within) * 4;
            const float4 sum = read(from), up = GATED ? read(from + OUTPUTS * 4) : sum;
            *(uint2*)(out + (size_t)token * width + column + within) = four_of(sum, up, bias, column + within, width);
        }
        if (!LOOPED) break;
    }
}
