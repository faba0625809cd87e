// What the kernels share that take pieces from a `PieceQueue` (`attention.cu`, `scaled_attention.cu`): sizes, a piece,
// instructions, and rows whose parts are put together. DIM, GROUP, KV_HEADS, PAGE and STAGES are defined before.

constexpr int KEYS = 64, HEADS = KV_HEADS * GROUP;
constexpr int GROUPS = 2, THREADS = 128 * GROUPS, FETCHERS = 128;
constexpr int FETCHED = 16;                // keys per load where a block is not full, or pages are small
constexpr bool WHOLE = PAGE % KEYS == 0;   // a full block lies in one page
constexpr int PARTIAL = DIM + 2;           // floats of a row's part: results, peak, weight
constexpr int NARROW = 8, OWN = KEYS / 4;  // most rows that become columns, and keys per warp of a block
constexpr int SOME = DIM / 32;             // columns of a row's results that each thread of a warp has
constexpr int PITCH = DIM + 4;             // floats per row in the reduction; 4 against bank conflicts
constexpr int KNOWN = 2 * STAGES;          // pieces whose lines are kept: those in the ring and those being finished
#define NOTHING __uint_as_float(0xFF800000u)  // minus infinity, the score of masked keys
#define LOG2_E 1.4426950408889634f

static_assert(PAGE % FETCHED == 0, "a fetch stays within a page");

struct Piece {
    int row, token, tokens, first;      // its tokens, and the position of the first one; no tokens: no more pieces
    int history, begin, finish, parts;  // keys of the row from earlier steps; its own keys; pieces of the tile
    int part, room, line, head;         // which of those it is; where the first one's results go; its line
};

// The piece of that number among those of all lines and heads; one without tokens after the last.
__device__ __forceinline__ Piece piece_of(const int4* listed, int which, int lines) {
    Piece piece;
    piece.tokens = 0;
    if (which < lines * KV_HEADS) {
        const int line = which / KV_HEADS;
        const int4 low = listed[3 * line], middle = listed[3 * line + 1], high = listed[3 * line + 2];
        piece = {low.x, low.y, low.z, low.w, middle.x, middle.y, middle.z, middle.w,
                 high.x, high.y, line, which % KV_HEADS};
    }
    return piece;
}

__device__ __forceinline__ void meet(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Atomic increment with acquire-release order; returns the old value.
__device__ __forceinline__ int count_up(int* counter) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

__device__ __forceinline__ float power_of_two(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// Instructions of a warp: four blocks of 8 x 8 elements of 16 bits from shared memory, as they lie or turned over; and
// a block turned over.

template <bool TURNED>
__device__ __forceinline__ void load_blocks(u32 (&blocks)[4], u32 address) {
    if (TURNED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
                     : "r"(address)
                     : "memory");
}

__device__ __forceinline__ u32 turn_over(u32 block) {
    u32 turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(block));
    return turned;
}

// A row of a piece, put together from the parts that others have: some columns of its results.
struct Row {
    float peak, weight, mixed[SOME];

    __device__ __forceinline__ void clear() {
        peak = NOTHING, weight = 0.0f;
#pragma unroll
        for (int i = 0; i < SOME; i++) mixed[i] = 0.0f;
    }

    __device__ __forceinline__ void add(const float* theirs, float their_peak, float their_weight) {
        const float higher = fmaxf(peak, their_peak), anchor = higher == NOTHING ? 0.0f : higher;
        const float shrink = power_of_two(peak - anchor), share = power_of_two(their_peak - anchor);
        peak = higher, weight = weight * shrink + their_weight * share;
#pragma unroll
        for (int i = 0; i < SOME; i++) mixed[i] = mixed[i] * shrink + theirs[i] * share;
    }

    __device__ __forceinline__ void leave(float* part, int at) {
#pragma unroll
        for (int i = 0; i < SOME; i += 2) __stcg((float2*)(part + at + i), make_float2(mixed[i], mixed[i + 1]));
        if (at == 0) __stcg((float2*)(part + DIM), make_float2(peak, weight));
    }

    __device__ __forceinline__ void finish(u16* to, float sum) {
        const float whole = 1.0f / sum;
#pragma unroll
        for (int i = 0; i < SOME; i += 2) *(u32*)(to + i) = pair_of(mixed[i] * whole, mixed[i + 1] * whole);
    }
};
