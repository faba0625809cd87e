// Helpers of the product kernels: the barriers of a ring, loads of the inputs, and the epilogue with bias and
// activation in float32. Compiled with ACTIVATION defined, and with `hopper.cu` before it.

constexpr bool GATED = ACTIVATION == 1 || ACTIVATION == 2 || ACTIVATION == 3;
constexpr float CLAMP_ALPHA = 1.702f, CLAMP_LIMIT = 7.0f;

// The "full" barrier of each stage, followed by its "empty" barrier.
__device__ __forceinline__ void set_up_ring(u32 barriers, int places, u32 readers) {
    for (int i = 0; i < places; i++) {
        set_up(barriers + 16 * i, 1);
        set_up(barriers + 16 * i + 8, readers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void fetch(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ float as_float(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ float rounded(float value) { return __uint_as_float(pair_of(0.0f, value) & 0xFFFF0000u); }

__device__ __forceinline__ float sigmoid(float value) { return 1.0f / (1.0f + __expf(-value)); }

__device__ __forceinline__ float biased(float sum, const u16* bias, int column) {
    return bias ? sum + as_float(bias[column]) : sum;
}

// An output from its sums. The halves of a gated one are rounded as if they had been stored.
__device__ __forceinline__ float finished(float sum, float up_sum, const u16* bias, int column, int width) {
    float gate = biased(sum, bias, column);
    if (ACTIVATION == 0) return gate;
    gate = rounded(gate);
    if (ACTIVATION == 4) {
        float positive = fmaxf(gate, 0.0f);
        return positive * positive;
    }
    float up = rounded(biased(up_sum, bias, width + column));
    if (ACTIVATION == 1) return gate * sigmoid(gate) * up;
    if (ACTIVATION == 2) {
        float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
        return gate * sigmoid(2.0f * inner) * up;
    }
    float low = fminf(gate, CLAMP_LIMIT), high = fminf(fmaxf(up, -CLAMP_LIMIT), CLAMP_LIMIT);
    return low * sigmoid(CLAMP_ALPHA * low) * (high + 1.0f);
}

// Four adjacent outputs from their sums; for a gated activation also from those of the other half.
__device__ __forceinline__ uint2 four_of(float4 sum, float4 up, const u16* bias, int column, int width) {
    uint2 four;
    four.x = pair_of(finished(sum.x, up.x, bias, column, width), finished(sum.y, up.y, bias, column + 1, width));
    four.y = pair_of(finished(sum.z, up.z, bias, column + 2, width), finished(sum.w, up.w, bias, column + 3, width));
    return four;
}
