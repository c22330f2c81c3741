// The TMA producer of the persistent kernel: one lane that requests the weights of all layers, and the cache, in the order in
// which they are used. It waits for nothing but room, so memory stays busy while activations are on their way.
#pragma once
#include "persistent/shape.cuh"
#include "tma/ring.cuh"

// A tensor map into the cache of the copying unit.
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
                // The maps of what comes next.
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
    __device__ __forceinline__ static void prefetch(const StepLayer* layer, int product) {
        prefetch_map(&layer->words[product]);
        prefetch_map(&layer->scales[product]);
        if (S::ZEROS) prefetch_map(&layer->zeros[product]);
    }
    __device__ __forceinline__ u32 begin(u32 bytes) {
        window.admit();
        ring.wait_empty();
        const u32 barrier = ring.full + 8 * ring.stage;
        barrier_expect(barrier, LAB_NO_COPIES ? 0 : bytes);
        return barrier;
    }
    __device__ __forceinline__ void product(const StepLayer* layer, int product) {
        const ProductShape& shape = step.shape[product];
        const Share<S> share = plan.shares[product];
#pragma unroll 1
        for (int i = 0; i < share.tiles; ++i) {
            const int tile = share.tile(i);
#pragma unroll 1
            for (int unit = 0; unit < share.units; unit += S::TEAM) {
                const int units = min(S::TEAM, share.units - unit);
                const u32 barrier = begin(units * S::UNIT_COPIED_BYTES), words = ring.address();
                const u32 stage_scales = scales + ring.stage * S::SCALE_BYTES;
#pragma unroll 1
                for (int u = 0; u < units && !LAB_NO_COPIES; u += shape.box_units) {
                    const int at = share.first + unit + u;
                    copy_box_once(words + u * S::UNIT_BYTES, &layer->words[product], 0, tile, at * S::UNIT_ROWS, barrier);
                    copy_box_once(stage_scales + u * S::UNIT_SCALE_BYTES, &layer->scales[product], 0, tile,
                                  at * S::UNIT_GROUPS, barrier);
                    if (S::ZEROS)
                        copy_box_once(stage_scales + S::ZEROS_AT + u * S::UNIT_SCALE_BYTES, &layer->zeros[product], 0, tile,
                                      at * S::UNIT_GROUPS, barrier);
                }
                ring.advance();
            }
        }
    }
    __device__ __forceinline__ void attention(const StepLayer* layer) {
#pragma unroll 1
        for (int index = blockIdx.x; index < plan.units; index += gridDim.x) {
            const AttentionUnit unit = plan.unit(index);
            const Chunks chunks(unit, plan.length[unit.row], layer->window);
            const int first = (unit.row * step.kv_heads + unit.kv_head) * step.capacity;
#pragma unroll 1
            for (int j = 0; j < chunks.count; ++j) {
                const u32 barrier = begin(2 * S::CACHE_BYTES), at = ring.address();
                const int y = first + (chunks.begin + j) * CHUNK_POSITIONS;
#pragma unroll
                for (int slab = 0; slab < S::HEAD_DIM / 64 && !LAB_NO_COPIES; ++slab) {
                    copy_box(at + slab * S::POSITION_SLAB_BYTES, &layer->keys, slab * 64, y, barrier);
                    copy_box(at + S::CACHE_BYTES + slab * S::POSITION_SLAB_BYTES, &layer->values, slab * 64, y, barrier);
                }
                ring.advance();
            }
        }
    }
};
