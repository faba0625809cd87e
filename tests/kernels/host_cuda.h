// What CUDA sources need to run on a CPU: a coroutine for each lane, barriers for what a warp or a program does together.
// Functions that are one instruction on the GPU are written out; `on_host.py` takes theirs out of the source.
//
// All coroutines run in one thread, in an order that is always the same and that shows missing barriers. A lane runs
// until it waits; the lane that was last made ready is the next. So a warp goes as far ahead of the others as the barriers
// of its program allow, and its lanes take turns from the last to the first and from the first to the last.
//
// Headers of C alone: those of C++ take longer to compile than a kernel.

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define __grid_constant__

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
struct Index { int x; };

Index threadIdx, blockIdx, gridDim;

struct Program;

// A lane of a warp; `turn` counts what it has done together with the others, `next` is in the list that it waits in.
struct Lane {
    ucontext_t context;
    Lane* next;
    Program* program;
    int thread, block, turn;
};

Lane launching;  // waits until no lane is ready
Lane *running, *ready;
Program* program;

// The lane that waits last becomes ready last, and runs first.
inline void make_ready(Lane*& waiting) {
    Lane** end = &waiting;
    while (*end) end = &(*end)->next;
    *end = ready, ready = waiting, waiting = nullptr;
}

// Let the lane that was last made ready run. Where there is none, the launch ends: all have returned, or none ever will.
inline void run_another() {
    Lane* from = running;
    if (!ready) setcontext(&launching.context);
    running = ready, ready = ready->next;
    threadIdx.x = running->thread, blockIdx.x = running->block, program = running->program;
    if (running != from) swapcontext(&from->context, &running->context);
}

inline void wait_in(Lane*& waiting) {
    running->next = waiting, waiting = running;
    run_another();
}

// A barrier of so many lanes.
struct Barrier {
    int lanes, come;
    Lane* waiting;

    void open() { come = 0, make_ready(waiting); }

    void meet() {
        if (++come == lanes) open();
        else wait_in(waiting);
    }

    void leave() {
        if (come == --lanes) open();
    }
};

// What the lanes of a warp show each other; those of the next turn do not overwrite it.
struct Warp {
    Barrier all;
    struct { u32 a[32][4], b[32][2], votes[32]; } turns[2];
};

struct Program {
    Barrier all, readers;
    Warp warps[16];
    char memory[256 << 10];  // shared
    struct { int completed, expected; Lane* waiting; } arrivals[2048];  // by address
    int readers_of_place;
};

// Programs that run at the same time.
Program programs_of_cluster[16];
Barrier cluster;

inline Warp& warp_of_thread() { return program->warps[threadIdx.x / 32]; }
inline auto& next_turn() { return warp_of_thread().turns[running->turn++ % 2]; }
inline void __syncthreads() { program->all.meet(); }
inline void __syncwarp() { warp_of_thread().all.meet(); }
inline void launch_next() {}
inline void wait_for_inputs() {}
inline int min(int a, int b) { return a < b ? a : b; }
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline float __expf(float value) { return expf(value); }

inline u32 __ballot_sync(u32, bool vote) {
    auto& shown = next_turn();
    shown.votes[threadIdx.x % 32] = vote;
    warp_of_thread().all.meet();
    u32 bits = 0;
    for (int i = 0; i < 32; i++) bits |= shown.votes[i] << i;
    return bits;
}

inline float __uint_as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

template <typename T>
T __ldg(const T* from) { return *from; }

inline u32 __funnelshift_r(u32 low, u32 high, int by) { return (u32)(((u64)high << 32 | low) >> by); }
inline u32 __funnelshift_l(u32 low, u32 high, int by) { return (u32)(((u64)high << 32 | low) << by >> 32); }

inline u32 rounded_bits(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

inline float low_of(u32 pair) { return __uint_as_float(pair << 16); }
inline float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
inline u32 pair_of(float low, float high) { return rounded_bits(low) | rounded_bits(high) << 16; }
inline u32 minus(u32 a, u32 b) { return pair_of(low_of(a) - low_of(b), high_of(a) - high_of(b)); }
inline u32 times(u32 a, u32 b) { return pair_of(low_of(a) * low_of(b), high_of(a) * high_of(b)); }

inline u32 masked(u32 a, u32 mask, u32 bits) { return (a & mask) | bits; }

inline float half_precision(u32 bits) {
    _Float16 value;
    const u16 low = (u16)bits;
    memcpy(&value, &low, 2);
    return (float)value;
}

inline uint4 load_once(const char* from) {
    uint4 four;
    memcpy(&four, from, 16);
    return four;
}

// mma.m16n8k16: where each lane has which elements is as in the description of the instruction set.
inline void matrix_product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, bool add) {
    auto& shown = next_turn();
    const int lane = threadIdx.x % 32;
    memcpy(shown.a[lane], a, sizeof a);
    shown.b[lane][0] = b0, shown.b[lane][1] = b1;
    warp_of_thread().all.meet();
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        if (!add) d[i] = 0.0f;
        for (int k = 0; k < 16; k++) {
            const u32 left = shown.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const u32 right = shown.b[column * 4 + k % 8 / 2][k / 8];
            d[i] += k % 2 ? high_of(left) * high_of(right) : low_of(left) * low_of(right);
        }
    }
}

inline void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { matrix_product(d, a, b0, b1, true); }
inline void multiply_first(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { matrix_product(d, a, b0, b1, false); }

// Shared memory: an address is a place in that of the program.
inline u32 __cvta_generic_to_shared(const char*) { return 0; }

template <typename T>
inline T read_shared(u32 address) {
    if (address % sizeof(T)) abort();
    T value;
    memcpy(&value, program->memory + address, sizeof value);
    return value;
}

inline float4 read(u32 address) { return read_shared<float4>(address); }
inline u32 read_word(u32 address) { return read_shared<u32>(address); }
inline uint4 read_four(u32 address) { return read_shared<uint4>(address); }
inline void write_word(u32 address, u32 word) { memcpy(program->memory + address, &word, 4); }
inline u32 __float_as_uint(float value) { return *(u32*)&value; }
inline void publish() {}
inline u32 read_half(u32 address) { return read_shared<u16>(address); }

// Copies arrive when they are asked for; who waits for them waits.
inline auto& arrivals_at(u32 barrier) { return program->arrivals[barrier / 8 % 2048]; }
inline void set_up_arrivals(u32) {}
inline void expect(u32 barrier, u32 bytes) { arrivals_at(barrier).expected = bytes; }

// Copies by the lanes themselves arrive at once.
inline void commit_copies() {}

template <int LEFT>
inline void wait_for_copies() {}

inline void copy_in(u32 to, const u16* from, bool real) {
    char* at = program->memory + to;
    if (real) memcpy(at, from, 16);
    else memset(at, 0, 16);
}

// A ring of places: a barrier for what arrives in each, and one for the warps that have read it.
inline void set_up_ring(u32, int, u32 readers) { program->readers_of_place = readers; }

inline void arrive(u32 barrier) {
    auto& there = arrivals_at(barrier);
    if (++there.expected < program->readers_of_place) return;
    there.expected = 0, there.completed++;
    make_ready(there.waiting);
}

inline void fetch_run(u32 to, const void* from, u32 bytes, u32 barrier) {
    if (to % 16 || (u64)from % 16 || bytes % 16) abort();  // as the copy engine
    memcpy(program->memory + to, from, bytes);
    auto& there = arrivals_at(barrier);
    if ((there.expected -= bytes) > 0) return;
    there.completed++;
    make_ready(there.waiting);
}

// All warps of a program but the last.
inline void meet_readers() { program->readers.meet(); }

// A barrier of some warps; all of them come equally often.
inline void meet(int) { program->all.meet(); }

// A tensor of three dimensions, and the box of it that is copied at a time; the first dimension is copied whole.
struct TensorMap {
    const char* data;
    int bytes, second, third;
    long long second_stride, third_stride;
    int seconds, thirds;
};

inline void fetch_box(u32 to, const TensorMap* map, int second, int third, u32 barrier) {
    char* at = program->memory + to;
    if (to % 128) abort();  // as the copy engine
    for (int i = 0; i < map->thirds; i++)
        for (int j = 0; j < map->seconds; j++, at += map->bytes) {
            if (third + i < map->third && second + j < map->second)
                memcpy(at, map->data + (third + i) * map->third_stride + (second + j) * map->second_stride, map->bytes);
            else memset(at, 0, map->bytes);
        }
    auto& there = arrivals_at(barrier);
    if ((there.expected -= map->thirds * map->seconds * map->bytes) > 0) return;
    there.completed++;
    make_ready(there.waiting);
}

inline void wait(u32 barrier, u32 parity) {
    auto& there = arrivals_at(barrier);
    while ((there.completed & 1) == (int)parity) wait_in(there.waiting);
}

// Of a cluster.
template <int PROGRAMS>
inline void meet(bool) { cluster.meet(); }

template <int PROGRAMS>
inline float4 read_from(u32 of, u32 address) {
    float4 value;
    memcpy(&value, programs_of_cluster[of].memory + address, sizeof value);
    return value;
}

// wgmma with the first operand in registers; each warp has its own 16 of the 64 rows. A descriptor is an address in 16s.
inline u64 block_at(u32 address, u32 = 16) { return address >> 4; }
inline void begin_products() {}
inline void commit_products() {}

template <int LEFT>
inline void wait_for_products() {}

template <int COUNT>
inline void pin(float (&)[COUNT]) {}

template <int COUNT>
inline void multiply_all(float (&d)[COUNT], const u32 (&a)[4], u64 b, int add) {
    auto& shown = next_turn();
    const int lane = threadIdx.x % 32;
    memcpy(shown.a[lane], a, sizeof a);
    warp_of_thread().all.meet();
    for (int sum = 0; sum < COUNT; sum++) {
        const int row = lane / 4 + sum / 2 % 2 * 8, token = sum / 4 * 8 + lane % 4 * 2 + sum % 2;
        if (!add) d[sum] = 0.0f;
        for (int k = 0; k < 16; k += 2) {
            const u32 left = shown.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const u32 at = (u32)b * 16 + token * 128 + k * 2, right = read_word(at ^ (at >> 7 & 7) << 4);
            d[sum] += low_of(left) * low_of(right) + high_of(left) * high_of(right);
        }
    }
}

// Run clusters one after another, all lanes of their programs in turn; returns how many lanes wait for ever.
template <typename Kernel>
int run(int programs, int threads, int together, Kernel kernel) {
    constexpr int LANES = 512, STACK = 64 << 10;
    static Lane lanes[16 * LANES];
    static char stacks[sizeof lanes / sizeof *lanes][STACK];
    static Kernel* body;
    static int left;
    if (threads > LANES || together > 16) abort();
    body = &kernel, gridDim.x = programs;
    for (int first = 0; first < programs; first += together) {
        cluster = {together * threads};
        for (int i = 0; i < together; i++) {
            Program& each = programs_of_cluster[i];
            memset(&each, 0, sizeof each);
            memset(each.memory, 0xFF, sizeof each.memory);  // not a number
            each.all.lanes = threads, each.readers.lanes = threads - 32;
            for (int warp = 0; warp < threads / 32; warp++) each.warps[warp].all.lanes = 32;
        }
        ready = nullptr;
        for (left = 0; left < together * threads; left++) {
            Lane& lane = lanes[left];
            getcontext(&lane.context);
            lane.context.uc_stack.ss_sp = stacks[left], lane.context.uc_stack.ss_size = STACK;
            makecontext(&lane.context, [] {
                (*body)();
                left--;
                program->all.leave(), warp_of_thread().all.leave();
                run_another();
            }, 0);
            lane.program = programs_of_cluster + left / threads;
            lane.thread = left % threads, lane.block = first + left / threads, lane.turn = 0;
            lane.next = ready, ready = &lane;
        }
        running = &launching;
        run_another();
        if (left) return left;
    }
    return 0;
}
