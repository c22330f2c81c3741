// Results of latent attention: the splits added, and multiplied by the values' half of the expansion.
//
//   x = sum over splits of 2^(maximum - most) sums / sum over splits of 2^(maximum - most) total      [L] of a row and a head
//   out[m, h] = V_h x                                                                                  V_h is [V, L]
//
// A block takes 8 rows of a head and some of the V outputs (step/latent_product.cuh). It adds the splits itself, because
// there are few: adding them again in every block takes less time than launching another kernel to add them once. Where there are
// fewer than 8 rows, several warps share the splits of each, and their sums meet in shared memory.
//
// Configuration: Element, IN (L), OUT (V), TILE (of step/latent_attend.cuh).
#pragma once
#include "fault_site.cuh"
#include "step/latent_product.cuh"
#include "step/latent_split.cuh"

// Mirrored in kernels/step/latent.py.
struct LatentValues {
    const float* sums;     // [rows, splits, heads, IN]
    const float2* totals;  // [rows, splits, heads]: maximum and total
    const u16* weight;
    u16* out;
    const int* lengths;
    i64 out_stride;
    int rows, heads, splits, capacity;
};

template <typename C>
__device__ __forceinline__ void latent_values(const LatentValues& given) {
    typedef typename C::Element E;
    typedef LatentProduct<C> Product;
    constexpr int PITCH = C::IN + 32;  // rows begin 16 banks apart
    __shared__ LatentSums sums;
    __shared__ __align__(16) u16 merged[LATENT_ROWS][PITCH];
    __shared__ __align__(16) float parts[LATENT_ROWS][C::IN];
    __shared__ float2 part_totals[LATENT_ROWS];
    launch_dependents();
    const int tile = blockIdx.x % Product::TILES, head = blockIdx.x / Product::TILES % given.heads;
    const int first = blockIdx.x / (Product::TILES * given.heads) * LATENT_ROWS, rows = min(LATENT_ROWS, given.rows - first);
    const Product product(given.weight + (i64)head * C::OUT * C::IN, tile * Product::COLUMNS);
    FAULT_SITE(latent_values_wait, wait_for_previous_kernel();)
    // Warps share the splits of the rows that there are, and a lane all the channels, so that many loads are on their way together.
    constexpr int QUADS = C::IN / 128, WARPS = LATENT_THREADS / 32;
    static_assert(WARPS == LATENT_ROWS && C::IN % 128 == 0, "a warp a row at least, whole quads a lane");
    const int warp = threadIdx.x / 32, channel = threadIdx.x % 32 * 4;
    const int each = rows > 4 ? 1 : rows > 2 ? 2 : rows > 1 ? 4 : 8, row = warp / each;
    float most = __uint_as_float(0xff800000u), whole = 0.f, x[QUADS][4] = {};
    int active = 0;
    if (row < rows)
        active = latent_split<C::TILE>(min(load_scalar(given.lengths + first + row) + 1, given.capacity), given.splits, 0).active;
    const i64 slot = (i64)(first + row) * given.splits * given.heads + head;
    // Splits that a warp requests together: four of them lack registers before Hopper.
    constexpr int TOGETHER = __CUDA_ARCH__ >= 900 ? 4 : 3;
#pragma unroll TOGETHER
    for (int split = warp % each; split < active; split += each) {
        const i64 at = slot + (i64)split * given.heads;
        const u32* numbers = reinterpret_cast<const u32*>(given.totals + at);
        const float their = __uint_as_float(load_l2_word(numbers)), total = __uint_as_float(load_l2_word(numbers + 1));
        uint4 found[QUADS];
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) found[quad] = load_l2(given.sums + at * C::IN + channel + 128 * quad);
        const float higher = their > most ? their : most, shrink = exp2f(most - higher), share = exp2f(their - higher);
        most = higher;
        whole = whole * shrink + total * share;
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            const u32 sums_of[4] = {found[quad].x, found[quad].y, found[quad].z, found[quad].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) x[quad][i] = x[quad][i] * shrink + share * __uint_as_float(sums_of[i]);
        }
    }
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad)
        *reinterpret_cast<float4*>(parts[warp] + channel + 128 * quad) = make_float4(x[quad][0], x[quad][1], x[quad][2], x[quad][3]);
    if (threadIdx.x % 32 == 0) part_totals[warp] = make_float2(most, whole);
    FAULT_SITE(latent_parts_there, __syncthreads();)
    // Adds row `warp` up from its `each` parts, of which the first has a split at least.
    u32* to = reinterpret_cast<u32*>(merged[warp] + channel);
    float shares[WARPS];
    most = __uint_as_float(0xff800000u), whole = 0.f;
    const int there = warp < rows ? each : 0;
    for (int part = 0; part < there; ++part) most = fmaxf(most, part_totals[warp * each + part].x);
#pragma unroll
    for (int part = 0; part < WARPS; ++part) {
        if (part >= there) continue;
        const float2 totals = part_totals[warp * each + part];
        shares[part] = exp2f(totals.x - most);
        whole += totals.y * shares[part];
    }
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int part = 0; part < WARPS; ++part) {
            if (part >= there) continue;
            const float4 found = *reinterpret_cast<const float4*>(parts[warp * each + part] + channel + 128 * quad);
            sum.x += found.x * shares[part], sum.y += found.y * shares[part];
            sum.z += found.z * shares[part], sum.w += found.w * shares[part];
        }
        const float unit = there > 0 ? 1.f / whole : 0.f;
        to[64 * quad] = E::narrow(sum.x * unit, sum.y * unit);
        to[64 * quad + 1] = E::narrow(sum.z * unit, sum.w * unit);
    }
    FAULT_SITE(latent_merged_there, __syncthreads();)
    const u32 mine = shared_address(merged[product.u]) + 16 * product.v;
    product.multiply(sums, [&](int chunk) { return load_shared(mine + 64 * chunk); });
    Product::finish(sums, [&](int row, int column, u32 pair) {
        u16* to = given.out + (first + row) * given.out_stride + head * C::OUT + tile * Product::COLUMNS + column;
        if (row < rows) *reinterpret_cast<u32*>(to) = pair;
    });
}

#define INSTANTIATE_STEP_LATENT_VALUES(NAME, CONFIGURATION)                                     \
    extern "C" __global__ void __launch_bounds__(LATENT_THREADS, 1) NAME(LatentValues given) {     \
        latent_values<CONFIGURATION>(given);                                                    \
    }
