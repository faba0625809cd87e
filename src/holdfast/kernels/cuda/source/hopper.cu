// What the kernels for Hopper share: barriers of the copy engine, descriptors of the matrix units, numbers in bfloat16.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct __align__(64) TensorMap {
    char opaque[128];
};

// Barriers: one that fills as a place does, and one that fills as its readers leave it.

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

// The mark of what is read once: it leaves the second cache first.
__device__ __forceinline__ u64 read_once() {
    u64 mark;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(mark));
    return mark;
}

// Have a tensor's map at hand before the first copy needs it.
__device__ __forceinline__ void look_up(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The kernel after this one may begin; and all that the kernels before it have written is there.

__device__ __forceinline__ void launch_next() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// How the matrix units find rows of 128 bytes, swizzled in eights; `aside` is from one block of 64 columns to the next.
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
