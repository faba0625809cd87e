// Codes of 4 or 8 bits as operands of matrix instructions, on Hopper: they become numbers in registers.
//
// `packing.py` arranges a weight in bricks of 16 rows by 64 columns, each one run of memory, in which a lane finds the
// operands of four matrix instructions in 16 bytes (32 for 8 bits). Columns are dealt out within a group, so that a
// lane needs eight neighbours of a token's inputs at a time (four where groups have 16 columns). A weight has
// `row_blocks` blocks of 64 rows, an even number.
//
// `codes_few.cu`, `codes_stream.cu`, `codes_picks.cu` and `codes_wide.cu` are compiled with this file before them, which
// has what they share, and `expand` for many tokens. Compiled with KIND, SCALES, ZEROS, GROUP, TOKENS, ROW_WARPS, K_WARPS, BESIDE
// (programs of a multiprocessor), ACTIVATION, EXPERTS and SHARED defined, and with `hopper.cu` and `projection.cu`
// before it.

enum { INT4, E2M1, INT8, E4M3 };
enum { OF_BFLOAT16, OF_FLOAT16, OF_FLOAT32, OF_EXPONENTS };

constexpr int WARPS = ROW_WARPS * K_WARPS, THREADS = 32 * WARPS;
[[maybe_unused]] constexpr int TILES = TOKENS / 8;
constexpr bool WIDE = KIND == INT8 || KIND == E4M3;
constexpr int PIECES = WIDE ? 2 : 1;                   // of 16 bytes, of a lane in a brick
constexpr u32 BRICK = 512 * PIECES;                    // bytes
constexpr int PARTS = GROUP >= 64 ? 1 : 64 / GROUP;    // groups in a brick
constexpr int RUN = GROUP > 64 ? GROUP / 64 : 1;       // bricks that share scales
constexpr int STEPS = 4 / PARTS;                       // of 16 columns in a group, within a brick
constexpr int DEALT = GROUP == 16 ? 4 : 8;             // neighbours of a lane
constexpr int SCALE_BYTES = SCALES == OF_FLOAT32 ? 4 : SCALES == OF_EXPONENTS ? 1 : 2;
[[maybe_unused]] constexpr int SMALL = 2 * PARTS * SCALE_BYTES, SMALL_ZEROS = 2 * PARTS;  // bytes of a lane in a brick
constexpr int SCALE_WORDS = (2 * PARTS * SCALE_BYTES + 3) / 4, ZERO_WORDS = (2 * PARTS + 3) / 4;

// A lane's part of a brick, with the scales and zero points of its two rows.
struct Brick {
    uint4 codes[PIECES];
    u32 scales[SCALE_WORDS];
    u32 zeros[ZEROS ? ZERO_WORDS : 1];
};

__device__ __forceinline__ uint4 load_once(const char* from) {
    uint4 four;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
                 : "l"(from));
    return four;
}

// Copy 16 bytes into shared memory beside other work, or zeros.
__device__ __forceinline__ void copy_in(u32 to, const u16* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait for this thread's copies but those of the last groups.
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ u32 minus(u32 a, u32 b) {
    u32 out;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

__device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 out;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

// (a & mask) | bits, which the compiler would compute in two instructions.
__device__ __forceinline__ u32 masked(u32 a, u32 mask, u32 bits) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(a), "r"(mask), "r"(bits));
    return out;
}

__device__ __forceinline__ float half_precision(u32 bits) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"((u16)bits));
    return out;
}

// The scale of one of a lane's two rows in a part of a brick.
__device__ __forceinline__ float scale_of(const Brick& brick, int part, int half) {
    const int at = 2 * part + half;
    if (SCALES == OF_FLOAT32) return __uint_as_float(brick.scales[at]);
    if (SCALES == OF_EXPONENTS) return __uint_as_float((brick.scales[at / 4] >> 8 * (at % 4) & 255) << 23);
    const u32 bits = brick.scales[at / 2] >> 16 * (at % 2) & 0xFFFF;
    return SCALES == OF_FLOAT16 ? half_precision(bits) : __uint_as_float(bits << 16);
}

// Two numbers of 4-bit integers, above 128; of a row's zero point the same.
constexpr u32 ABOVE = 0x43004300;

__device__ __forceinline__ u32 zero_of(const Brick& brick, int part, int half) {
    if (!ZEROS) return ABOVE | 0x00080008;
    const int at = 2 * part + half;
    return ABOVE + (brick.zeros[at / 4] >> 8 * (at % 4) & 255) * 0x00010001;
}

// The operand of 16 columns of a slab: pairs of columns, of two rows eight apart, then the same eight columns on.
// 4-bit floats lie in the word so that a rotation and a mask put the bits of three pairs where bfloat16 has them.
__device__ __forceinline__ void unpack(u32 (&pairs)[4], u32 word, u32 next, u32 zero, u32 second_zero) {
    if (KIND == INT4) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            pairs[i] = minus(masked(word >> 4 * i, 0x000F000F, ABOVE), i % 2 ? second_zero : zero);
    } else if (KIND == E2M1) {
        pairs[0] = word & 0x81C081C0;
        pairs[1] = __funnelshift_r(word, word, 3) & 0x81C081C0;
        pairs[2] = __funnelshift_l(word, word, 3) & 0x81C081C0;
        pairs[3] = (word >> 6 & 0x01800180) | (word << 6 & 0x00400040) | (word << 14 & 0x80008000);
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = times(pairs[i], 0x7E807E80);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 bytes = (i < 2 ? word : next) >> 8 * (i % 2) & 0x00FF00FF;
            if (KIND == INT8) pairs[i] = minus(masked(bytes, 0x007F007F, ABOVE), masked(bytes, 0x00800080, ABOVE));
            else pairs[i] = times((bytes << 8 & 0x80008000) | (bytes << 4 & 0x07F007F0), 0x7B807B80);
        }
    }
}

__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void add_to(float4& sum, float4 other) {
    sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
}

struct Weight {
    const char* codes;
    const char* scales;
    const char* zeros;
    const float* factors;
    int blocks, groups;  // of columns; runs of scales in a row, for 64 columns or more
};

__device__ __forceinline__ Weight weight_of(const char* codes, const char* scales, const char* zeros,
                                            const float* factors, int depth) {
    return {codes, scales, zeros, factors, depth / 64, 64 * RUN < depth ? depth / (64 * RUN) : 1};
}

// `BYTES` for a lane, of which several may read the same.
template <int BYTES>
__device__ __forceinline__ void load_small(u32* to, const char* from) {
    if (BYTES == 2) to[0] = __ldg((const u16*)from);
    if (BYTES == 4) to[0] = __ldg((const u32*)from);
    if (BYTES == 8) {
        const uint2 two = __ldg((const uint2*)from);
        to[0] = two.x, to[1] = two.y;
    }
#pragma unroll
    for (int i = 0; i < BYTES / 16; i++) {
        const uint4 four = __ldg((const uint4*)from + i);
        to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
    }
}

// Where a lane finds its part of a slab.
struct Slab {
    const char* codes;
    const char* scales;
    const char* zeros;
};

__device__ __forceinline__ Slab slab_of(const Weight& weight, size_t slab, int lane) {
    const size_t at = (slab * weight.groups * 8 + lane / 4) * 2 * PARTS;
    return {weight.codes + slab * weight.blocks * BRICK + lane * 16, weight.scales + at * SCALE_BYTES,
            ZEROS ? weight.zeros + at : nullptr};
}

// A lane's part of the brick that is there.
__device__ __forceinline__ void load_brick(Brick& to, const Slab& from) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) to.codes[i] = load_once(from.codes + i * 512);
    load_small<2 * PARTS * SCALE_BYTES>(to.scales, from.scales);
    if (ZEROS) load_small<2 * PARTS>(to.zeros, from.zeros);
}

// Where it finds its part of a brick `blocks` and its scales `runs` further.
__device__ __forceinline__ Slab further(const Slab& from, size_t blocks, int runs) {
    const int at = runs * 16 * PARTS;
    return {from.codes + blocks * BRICK, from.scales + at * SCALE_BYTES, ZEROS ? from.zeros + at : nullptr};
}

__device__ __forceinline__ void load_brick(Brick& to, const Slab& from, int block) {
    load_brick(to, further(from, block, block / RUN));
}

// Scales or zero points of a lane in shared memory.
template <int BYTES>
__device__ __forceinline__ void read_small(u32* to, u32 from) {
    if (BYTES == 2) to[0] = read_half(from);
#pragma unroll
    for (int i = 0; i < BYTES / 4; i++) to[i] = read_word(from + 4 * i);
}

__device__ __forceinline__ u32 word_of(const Brick& brick, int index) {
    const uint4 four = brick.codes[index / 4];
    return index % 4 == 0 ? four.x : index % 4 == 1 ? four.y : index % 4 == 2 ? four.z : four.w;
}

__device__ __forceinline__ void operand(u32 (&pairs)[4], const Brick& brick, int step) {
    const int part = step / STEPS;
    unpack(pairs, word_of(brick, WIDE ? 2 * step : step), WIDE ? word_of(brick, 2 * step + 1) : 0,
           zero_of(brick, part, 0), zero_of(brick, part, 1));
}

// `multiply` where nothing was added yet.
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

struct Outputs {
    const u16* bias;
    void* out;
    const int* picks;     // of a block; null without experts
    const float* shares;  // of picks, for the second product of experts
    int tokens, width;
};

// Four outputs of a token from their sums, with those of the other half if gated.
__device__ __forceinline__ void put(const Outputs& to, const float* factors, float4 sum, float4 up, int token,
                                    int column) {
    if (factors) {
        sum.x *= factors[column], sum.y *= factors[column + 1];
        sum.z *= factors[column + 2], sum.w *= factors[column + 3];
        if (GATED) {
            const float* of_up = factors + to.width + column;
            up.x *= of_up[0], up.y *= of_up[1], up.z *= of_up[2], up.w *= of_up[3];
        }
    }
    const size_t row = to.picks ? to.picks[token] : token;
    if (SHARED) {
        const float share = to.shares[row];
        float4 four = {biased(sum.x, to.bias, column) * share, biased(sum.y, to.bias, column + 1) * share,
                       biased(sum.z, to.bias, column + 2) * share, biased(sum.w, to.bias, column + 3) * share};
        *(float4*)((float*)to.out + row * to.width + column) = four;
    } else {
        *(uint2*)((u16*)to.out + row * to.width + column) = four_of(sum, up, to.bias, column, to.width);
    }
}

// The outputs of an expert for a block of picks.
__device__ __forceinline__ void choose(Outputs& outputs, const float*& factors, int expert, const int* picks) {
    const size_t rows = (size_t)expert * (GATED ? 2 : 1) * outputs.width;
    if (factors) factors += rows;
    if (outputs.bias) outputs.bias += rows;
    outputs.picks = picks;
}

// How many picks of a block are real; those come first.
__device__ __forceinline__ int count_real(const int* picks, int lane) {
    int count = 0;
    for (int at = lane; at < (TOKENS + 31) / 32 * 32; at += 32)
        count += __popc(__ballot_sync(~0u, at < TOKENS && picks[at < TOKENS ? at : 0] >= 0));
    return count;
}

// The rows of `count` blocks from `tile` on in bfloat16, for each of `experts`: a block a warp. With a gated activation
// the gate rows come first, then the up rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    expand(const char* codes, const char* scales, const char* zeros, const float* factors, u16* out, int tile,
           int count, int experts, int width, int depth, int row_blocks) {
    constexpr int OF_BLOCK = GATED ? 32 : 64, HALVES = GATED ? 2 : 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = depth / 64;
    const int at = blockIdx.x * WARPS + warp, block = at % blocks;
    const int expert = at / blocks / count, local = tile + at / blocks % count;
    const int begin = tile * OF_BLOCK, span = min(count * OF_BLOCK, width - begin);
    launch_next();
    wait_for_inputs();
    if (expert >= experts) return;
    const Weight weight = weight_of(codes, scales, zeros, factors, depth);
    out += (size_t)expert * HALVES * span * depth;
#pragma unroll
    for (int slab = 0; slab < 4; slab++) {
        Brick brick;
        load_brick(brick, slab_of(weight, ((size_t)expert * row_blocks + local) * 4 + slab, lane), block);
        const int half = GATED ? slab / 2 : 0, first = local * OF_BLOCK + (GATED ? slab % 2 : slab) * 16 + lane / 4;
        u32 made[2][8];  // of two rows 16 columns
        float by[2] = {1.0f, 1.0f};
        for (int i = 0; i < 2; i++)
            if (factors && first + 8 * i < width) by[i] = factors[((size_t)expert * HALVES + half) * width + first + 8 * i];
#pragma unroll
        for (int step = 0; step < 4; step++) {
            u32 pairs[4];
            operand(pairs, brick, step);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float scale = scale_of(brick, step / STEPS, i % 2) * by[i % 2];
                const float low = __uint_as_float(pairs[i] << 16), high = __uint_as_float(pairs[i] & 0xFFFF0000u);
                made[i % 2][2 * step + i / 2] = pair_of(low * scale, high * scale);
            }
        }
#pragma unroll
        for (int second = 0; second < 2; second++) {
            if (first + 8 * second >= width) continue;
            const size_t row = half * span + first + 8 * second - begin;
            u16* to = out + row * depth + block * 64 + lane % 4 * DEALT;
#pragma unroll
            for (int i = 0; i < 8; i += DEALT / 2) {
                if (DEALT == 8)
                    *(uint4*)(to + 8 * i) = {made[second][i], made[second][i + 1], made[second][i + 2], made[second][i + 3]};
                else *(uint2*)(to + 8 * i) = {made[second][i], made[second][i + 1]};
            }
        }
    }
}
