// The TMA producer of the persistent kernel: one lane that requests the weights of all layers, and the cache, in the order in
// which they are used. It waits only for free stages, so the memory stays busy while blocks wait for activations.
#pragma once
#include "persistent/shape.cuh"
#include "tma/ring.cuh"

// Prefetches a tensor map into the cache of the TMA unit.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

template <typename S>
struct StepProducer {
    const StepArguments& step;
    const Plan<S>& plan;
    Ring<S> ring;
    Window<S> window;
    u32 scales;  // address

    __device__ __forceinline__ StepProducer(const StepArguments& arguments, const Plan<S>& attention, const Ring<S>& empty)
        : step(arguments), plan(attention), ring(empty), window(empty), scales(empty.stages + S::SCALES_AT) {}

    __device__ __forceinline__ void run() {
        prefetch(step.layers, QKV);
        for (int l = 0; l < step.layer_count; ++l) {
            const StepLayer* layer = step.layers + l;
#pragma unroll 1
            for (int p = QKV; p < PRODUCTS; ++p) {
                // Prefetches the tensor maps of the next product.
                if (p == QKV) prefetch_map(&layer->keys), prefetch_map(&layer->values);
                if (p + 1 < PRODUCTS)
                    prefetch(layer, p + 1);
                else if (l + 1 < step.layer_count)
                    prefetch(layer + 1, QKV);
                product(layer, p);
                if (p == QKV) attention(layer);
            }
        }
    }

private:
    // The maps of the block's first set and of its last, which may be narrower.
    __device__ __forceinline__ void prefetch(const StepLayer* layer, int product) const {
        const Share<S>& share = plan.shares[product];
        const int first = share.set(0).log, last = share.tiles & ((1 << first) - 1);
        prefetch(layer, product, first);
        if (last != 0) prefetch(layer, product, last / 2);
        if (last == 3) prefetch(layer, product, 0);
    }
    __device__ __forceinline__ static void prefetch(const StepLayer* layer, int product, int log) {
        prefetch_map(&layer->words[product][log]);
        prefetch_map(&layer->scales[product][log]);
        if (S::ZEROS) prefetch_map(&layer->zeros[product][log]);
    }
    __device__ __forceinline__ u32 begin(u32 bytes) {
        window.admit();
        ring.wait_empty();
        const u32 barrier = ring.full + 8 * ring.stage;
        barrier_expect(barrier, bytes);
        return barrier;
    }
    __device__ __forceinline__ void product(const StepLayer* layer, int product) {
        const ProductShape& shape = step.shape[product];
        const Share<S> share = plan.shares[product];
        TileSet<S> set;
#pragma unroll 1
        for (int at = 0; at < share.tiles; at += set.tiles()) {
            set = share.set(at);
            const int boxed = shape.box_units[set.log];
            const TensorMap *weight_map = &layer->words[product][set.log], *scale_map = &layer->scales[product][set.log];
#pragma unroll 1
            for (int stage = 0; stage < set.stages; ++stage) {
                const int unit = set.unit_of(stage), units = min(1 << set.slices, share.units - unit);
                const u32 barrier = begin((units << set.log) * S::UNIT_COPIED_BYTES), words = ring.address();
                const u32 stage_scales = scales + ring.stage * S::SCALE_BYTES;
#pragma unroll 1
                for (int u = 0; u < units; u += boxed) {
                    const int channel_unit = share.first + unit + u, tile = share.first_tile + at;
                    const u32 scales_at = stage_scales + (u << set.log) * S::UNIT_SCALE_BYTES;
                    copy_box_once(words + (u << set.log) * S::UNIT_BYTES, weight_map, 0, tile, channel_unit * S::UNIT_ROWS, barrier);
                    copy_box_once(scales_at, scale_map, 0, tile, channel_unit * S::UNIT_GROUPS, barrier);
                    if (S::ZEROS)
                        copy_box_once(scales_at + S::ZEROS_AT, &layer->zeros[product][set.log], 0, tile, channel_unit * S::UNIT_GROUPS, barrier);
                }
                ring.advance();
            }
        }
    }
    __device__ __forceinline__ void attention(const StepLayer* layer) {
#pragma unroll 1
        for (int index = blockIdx.x; index < plan.units; index += gridDim.x) {
            const AttentionUnit unit = plan.unit(index);
            const Chunks<S> chunks(unit, plan.length, layer->window);
            const int first = unit.kv_head * step.capacity;
#pragma unroll 1
            for (int j = 0; j < chunks.count; ++j) {
                const u32 barrier = begin(2 * S::CACHE_BYTES), at = ring.address();
                const int y = first + (chunks.begin + j) * S::CHUNK;
#pragma unroll
                for (int slab = 0; slab < S::HEAD_DIM / 64; ++slab) {
                    copy_box(at + slab * S::POSITION_SLAB_BYTES, &layer->keys, slab * 64, y, barrier);
                    copy_box(at + S::CACHE_BYTES + slab * S::POSITION_SLAB_BYTES, &layer->values, slab * 64, y, barrier);
                }
                ring.advance();
            }
        }
    }
};
