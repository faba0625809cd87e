// What CUDA sources need to run on a CPU: a thread for each lane, barriers for what a warp or a program does together.
// Functions that are one instruction on the GPU are written out; `on_host.py` takes theirs out of the source.

#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
struct Index { int x; };

thread_local Index threadIdx, blockIdx, gridDim;

struct Warp {
    std::barrier<> all{32};
    u32 a[32][4], b[32][2], votes[32];
};

struct Program {
    std::barrier<> all;
    std::vector<std::unique_ptr<Warp>> warps;

    explicit Program(int threads) : all(threads) {
        for (int i = 0; i < threads / 32; i++) warps.emplace_back(new Warp);
    }
};

thread_local Program* program;

inline Warp& warp_of_thread() { return *program->warps[threadIdx.x / 32]; }
inline void __syncthreads() { program->all.arrive_and_wait(); }
inline void launch_next() {}
inline void wait_for_inputs() {}
inline int min(int a, int b) { return a < b ? a : b; }
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline float __expf(float value) { return expf(value); }

inline u32 __ballot_sync(u32, bool vote) {
    Warp& warp = warp_of_thread();
    warp.votes[threadIdx.x % 32] = vote;
    warp.all.arrive_and_wait();
    u32 bits = 0;
    for (int i = 0; i < 32; i++) bits |= warp.votes[i] << i;
    warp.all.arrive_and_wait();
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
    Warp& warp = warp_of_thread();
    const int lane = threadIdx.x % 32;
    memcpy(warp.a[lane], a, sizeof a);
    warp.b[lane][0] = b0, warp.b[lane][1] = b1;
    warp.all.arrive_and_wait();
    float sums[4];
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        sums[i] = add ? d[i] : 0.0f;
        for (int k = 0; k < 16; k++) {
            const u32 left = warp.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const u32 right = warp.b[column * 4 + k % 8 / 2][k / 8];
            sums[i] += k % 2 ? high_of(left) * high_of(right) : low_of(left) * low_of(right);
        }
    }
    warp.all.arrive_and_wait();
    memcpy(d, sums, sizeof d);
}

inline void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { matrix_product(d, a, b0, b1, true); }
inline void multiply_first(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { matrix_product(d, a, b0, b1, false); }

// Run programs one after another, each with all its threads at once.
template <typename Kernel>
void run(int programs, int threads, Kernel kernel) {
    for (int index = 0; index < programs; index++) {
        Program one(threads);
        std::vector<std::thread> lanes;
        for (int i = 0; i < threads; i++)
            lanes.emplace_back([&, i] {
                threadIdx.x = i, blockIdx.x = index, gridDim.x = programs, program = &one;
                kernel();
                one.all.arrive_and_drop();
                one.warps[i / 32]->all.arrive_and_drop();
            });
        for (std::thread& lane : lanes) lane.join();
    }
}
