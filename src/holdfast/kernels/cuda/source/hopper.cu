// Helpers of all Hopper kernels: mbarriers of the copy engine (TMA), wgmma descriptors, bfloat16 conversion.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct __align__(64) TensorMap {
    char opaque[128];
};

// mbarriers: a stage has a "full" barrier and an "empty" barrier.

__device__ __forceinline__ void set_up(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}\n" ::"r"(barrier), "r"(parity)
        : "memory");
}

// The L2 policy of data that is read once: evict first.
__device__ __forceinline__ u64 read_once() {
    u64 mark;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(mark));
    return mark;
}

// Prefetch a tensor map before the first copy needs it.
__device__ __forceinline__ void look_up(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Programmatic dependent launch: allow the next kernel to start; wait for the writes of the preceding ones.

__device__ __forceinline__ void launch_next() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The wgmma descriptor of rows of 128 bytes with the 128-byte swizzle; `aside` is the stride of 64-column blocks.
__device__ __forceinline__ u64 block_at(u32 address, u32 aside = 16) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)(aside >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// The compiler must not move sums across the instructions that work on them while they run.
template <int COUNT>
__device__ __forceinline__ void pin(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

__device__ __forceinline__ u32 pair_of(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// Shared memory by its address.

__device__ __forceinline__ u32 read_half(u32 address) {
    u16 half;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
    return half;
}

__device__ __forceinline__ u32 read_word(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

__device__ __forceinline__ uint4 read_four(u32 address) {
    uint4 four;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
                 : "r"(address)
                 : "memory");
    return four;
}

__device__ __forceinline__ void write_word(u32 address, u32 word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ float4 read(u32 address) {
    float4 four;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                 : "r"(address)
                 : "memory");
    return four;
}

// The barrier of a cluster of PROGRAMS; `release` publishes this program's writes to the others.
template <int PROGRAMS>
__device__ __forceinline__ void meet(bool release) {
    if (PROGRAMS == 1) {
        __syncthreads();
        return;
    }
    if (release)
        asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    else
        asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Four numbers of the shared memory of a program of the cluster.
template <int PROGRAMS>
__device__ __forceinline__ float4 read_from(u32 program, u32 address) {
    if (PROGRAMS == 1) return read(address);
    float4 value;
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}\n"
        : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
        : "r"(address), "r"(program));
    return value;
}
