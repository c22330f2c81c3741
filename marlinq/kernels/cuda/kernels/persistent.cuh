// A whole decode step of up to eight rows in one launch, but for embedding, last norm and head: compute capability 9.0.
//
// The hidden state goes through all layers: norm, qkv, attention, o, norm, gate and up, down. Every multiprocessor holds one
// block, and all blocks run at once. Each streams its share of all weights through one ring (persistent/producer.cuh), which
// never waits for activations. Blocks hand each other sums and activations as messages (persistent/message.cuh).
//
// A layer has five steps that all blocks depend on. Each one, from its sums:
//
//   qkv        parts of K -> attention, which adds them     attention  outputs of parts of the context -> o, which merges them
//   o, down    parts of K -> owners, which add the residual stream -> everybody
//   gate_up    parts of K -> owners, which apply the activation -> down
//
// Configuration: Codec, TEAM, TEAMS, STAGES, WINDOW, ROWS, SLOTS, HEAD_DIM, QUANT_GROUP, DIGITS (a single row), ZEROS,
// ACTIVATION_BYTES, SHARED_BYTES (persistent/shape.cuh).
#pragma once
#include "persistent/attention.cuh"
#include "persistent/epilogue.cuh"
#include "persistent/producer.cuh"

template <typename C>
struct PersistentStep {
    typedef StepShape<C> S;
    typedef typename C::Codec Codec;

    static __device__ __forceinline__ void run(const StepArguments& step) {
        extern __shared__ __align__(128) unsigned char dynamic[];
        __shared__ __align__(8) u64 barriers[2 * S::STAGES + 2 * S::SLOTS];
        typedef Plan<S> BlockPlan;
        __shared__ BlockPlan plan;
        __shared__ float roots[S::ROWS];

        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const u32 first_barrier = shared_address(barriers), slot_barriers = first_barrier + 16 * S::STAGES;
        Ring<S> ring(dynamic, first_barrier, warp == S::PRODUCER);
        unsigned char* shared = dynamic + (ring.stages - shared_address(dynamic));
        Ring<Slots<S>> slots(dynamic, slot_barriers, false);
        if (threadIdx.x == 0) {
            ring.init(0, S::STAGES, S::TEAM);
            for (int slot = 0; slot < S::SLOTS; ++slot) {
                barrier_init(slots.full + 8 * slot, 2 * S::WARPS);
                barrier_init(slots.empty + 8 * slot, 1);
            }
            barrier_init_fence();
            plan.make(step);
        }
        __syncthreads();

        if (warp == S::PRODUCER) {
            if (elected()) {
                StepProducer<S> producer(step, plan, ring);
                producer.run();
            }
        } else if (warp >= S::WARPS) {
            Epilogue<S, Codec> epilogue(step, plan, shared, slots, warp - S::WARPS, lane);
            epilogue.run();
        } else {
            Multiplier<S, Codec> walk(shared, ring, slots, warp, lane);
#pragma unroll 1
            for (int l = 0; l < step.layer_count; ++l) {
                const u32 round = l;
                const StepLayer& layer = step.layers[l];
                const int lane = opaque((int)threadIdx.x % 32), warp = opaque((int)threadIdx.x / 32);
                const Attention<S, Codec> attention{step, plan, shared, warp, lane};
#pragma unroll 1
                for (int product = QKV; product < PRODUCTS; ++product) {
                    if (warp == 0) MARK(0, 8 * product)
                    const Share<S> share = plan.shares[product];
                    // Whoever reads messages has to send some, which others wait for: so none is overwritten before it is read.
                    if (share.tiles > 0) {
                        finish(walk);
                        if (warp == 0) MARK(0, 8 * product + 1)
                        if (product == QKV || product == GATE_UP) {
                            const bool first = product == QKV;
                            NormSource<S> source{first ? step.stream : step.middle, first ? step.stream_squares : step.middle_squares,
                                                 first ? layer.attention_gamma : layer.mlp_gamma, roots, (u32)l, step.hidden,
                                                 step.narrow_first != 0};
                            stage(source, step, product, share, walk, warp, lane);
                        } else if (product == OUTPUT) {
                            AttentionSource<S> source{step, plan, (u32)l};
                            stage(source, step, product, share, walk, warp, lane);
                        } else {
                            PlainSource source{step.mlp, step.shape[DOWN].channels, (u32)l};
                            stage(source, step, product, share, walk, warp, lane);
                        }
                        if (warp == 0) MARK(0, 8 * product + 2)
                        meet<S>();
                        if (warp == 0) MARK(0, 8 * product + 3)
                        walk.factor = product == QKV || product == GATE_UP ? roots[0] : 1.f;
                        walk.multiply(share, step.rows);
                        if (warp == 0) MARK(0, 8 * product + 4)
                    }
                    if (product == QKV) {
                        finish(walk);
                        if (warp == 0) MARK(0, 8 * product + 5)
                        attention.run(walk, layer, l);
                    }
                }
            }
        }
    }

private:
    // All sums of the last product have left their slots, and nobody reads its activations any more.
    static __device__ __forceinline__ void finish(const Multiplier<S, Codec>& walk) {
        meet<S>();
        walk.wait_for_slots();
    }
    template <typename Source>
    static __device__ __forceinline__ void stage(Source& source, const StepArguments& step, int product, const Share<S>& share,
                                                 const Multiplier<S, Codec>& walk, int warp, int lane) {
        stage_activations<S, Codec>(source, step, share.first, share.units, step.shape[product].channels, walk.shared + S::ACTIVATIONS_AT,
                                    warp, lane);
    }
};

#define INSTANTIATE_PERSISTENT_STEP(NAME, CONFIGURATION)                                                     \
    extern "C" __global__ void __launch_bounds__(PersistentStep<CONFIGURATION>::S::THREADS, 1)              \
    NAME(const __grid_constant__ StepArguments step) {                                                       \
        PersistentStep<CONFIGURATION>::run(step);                                                            \
    }
