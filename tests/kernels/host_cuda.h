// What CUDA sources need to run on a CPU: a thread for each lane, barriers for what a warp or a program does together.
// Functions that are one instruction on the GPU are written out; `on_host.py` takes theirs out of the source.

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define __grid_constant__

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
struct Index { int x; };

thread_local Index threadIdx, blockIdx, gridDim;

struct Warp {
    std::barrier<> all{32};
    u32 a[32][4], b[32][2], votes[32];
};

struct Cluster;

struct Program {
    std::barrier<> all;
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<char> memory = std::vector<char>(256 << 10, (char)0xFF);  // shared; not a number
    struct { std::atomic<int> completed{0}, expected{0}; } arrivals[2048];  // by address
    Cluster* cluster;

    Program(int threads, Cluster* of) : all(threads), cluster(of) {
        for (int i = 0; i < threads / 32; i++) warps.emplace_back(new Warp);
    }
};

// Programs that run at the same time.
struct Cluster {
    std::barrier<> all;
    std::vector<std::unique_ptr<Program>> programs;

    Cluster(int count, int threads) : all(count * threads) {
        for (int i = 0; i < count; i++) programs.emplace_back(new Program(threads, this));
    }
};

thread_local Program* program;

inline Warp& warp_of_thread() { return *program->warps[threadIdx.x / 32]; }
inline void __syncthreads() { program->all.arrive_and_wait(); }
inline void __syncwarp() { warp_of_thread().all.arrive_and_wait(); }
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

// Shared memory: an address is a place in that of the program.
inline u32 __cvta_generic_to_shared(const char*) { return 0; }

template <typename T>
inline T read_shared(u32 address) {
    if (address % sizeof(T)) abort();
    T value;
    memcpy(&value, program->memory.data() + address, sizeof value);
    return value;
}

inline float4 read(u32 address) { return read_shared<float4>(address); }
inline u32 read_word(u32 address) { return read_shared<u32>(address); }
inline uint4 read_four(u32 address) { return read_shared<uint4>(address); }
inline void write_word(u32 address, u32 word) { memcpy(program->memory.data() + address, &word, 4); }
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
    char* at = program->memory.data() + to;
    if (real) memcpy(at, from, 16);
    else memset(at, 0, 16);
}

// A barrier of some warps; all of them come equally often.
inline void meet(int) { program->all.arrive_and_wait(); }

// A tensor of three dimensions, and the box of it that is copied at a time; the first dimension is copied whole.
struct TensorMap {
    const char* data;
    int bytes, second, third;
    long long second_stride, third_stride;
    int seconds, thirds;
};

inline void fetch_box(u32 to, const TensorMap* map, int second, int third, u32 barrier) {
    char* at = program->memory.data() + to;
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
    there.completed.notify_all();
}

inline void wait(u32 barrier, u32 parity) {
    auto& there = arrivals_at(barrier);
    for (int now = there.completed; (now & 1) == (int)parity; now = there.completed) there.completed.wait(now);
}

// Of a cluster.
template <int PROGRAMS>
inline void meet(bool) { program->cluster->all.arrive_and_wait(); }

template <int PROGRAMS>
inline float4 read_from(u32 of, u32 address) {
    float4 value;
    memcpy(&value, program->cluster->programs[of]->memory.data() + address, sizeof value);
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
    Warp& warp = warp_of_thread();
    const int lane = threadIdx.x % 32;
    memcpy(warp.a[lane], a, sizeof a);
    warp.all.arrive_and_wait();
    for (int sum = 0; sum < COUNT; sum++) {
        const int row = lane / 4 + sum / 2 % 2 * 8, token = sum / 4 * 8 + lane % 4 * 2 + sum % 2;
        if (!add) d[sum] = 0.0f;
        for (int k = 0; k < 16; k += 2) {
            const u32 left = warp.a[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const u32 at = (u32)b * 16 + token * 128 + k * 2, right = read_word(at ^ (at >> 7 & 7) << 4);
            d[sum] += low_of(left) * low_of(right) + high_of(left) * high_of(right);
        }
    }
    warp.all.arrive_and_wait();
}

// Run clusters one after another, each with all threads of its programs at once.
template <typename Kernel>
void run(int programs, int threads, int together, Kernel kernel) {
    for (int first = 0; first < programs; first += together) {
        Cluster cluster(together, threads);
        std::vector<std::thread> lanes;
        for (int i = 0; i < together * threads; i++)
            lanes.emplace_back([&, i] {
                threadIdx.x = i % threads, blockIdx.x = first + i / threads, gridDim.x = programs;
                program = cluster.programs[i / threads].get();
                kernel();
                program->all.arrive_and_drop();
                program->warps[threadIdx.x / 32]->all.arrive_and_drop();
            });
        for (std::thread& lane : lanes) lane.join();
    }
}
