// A whole decode step of one row in one launch, but for embedding, last norm and head: compute capability 9.0.
//
// The hidden state goes through all layers: norm, qkv, attention, o, norm, gate and up, down. Every multiprocessor holds one
// block, and all blocks run at once. Each streams its share of all weights through one ring (persistent/producer.cuh), which
// never waits for activations. Blocks hand each other sums and activations as messages (persistent/message.cuh).
//
// A layer has five steps that all blocks depend on. Each sends its partial sums:
//
//   qkv        parts of K -> blocks of attention, which add them
//   attention  outputs of parts of the context -> blocks of o, which merge them
//   o, down    parts of K -> all blocks, which add them to the residual stream
//   gate_up    parts of K -> owners of the columns, which apply the activation -> blocks of down
//
// Configuration: Codec, TEAM, TEAMS, STAGES, WINDOW, SLOTS, HEAD_DIM, QUANT_GROUP, ZEROS, SOFTCAP, POST_NORMS,
// ACTIVATION_BYTES, STREAM_UNITS, SHARED_BYTES (persistent/shape.cuh).
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
        __shared__ float slot_roots[S::SLOTS];

        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const u32 first_barrier = shared_address(barriers), slot_barriers = first_barrier + 16 * S::STAGES;
        Ring<S> ring(dynamic, first_barrier, warp == S::PRODUCER);
        unsigned char* shared = dynamic + (ring.stages - shared_address(dynamic));
        Ring<Slots<S>> slots(dynamic, slot_barriers, false);
        if (threadIdx.x == 0) {
            ring.init(0, S::STAGES, S::TEAM);
            for (int slot = 0; slot < S::SLOTS; ++slot) {
                barrier_init(slots.full + 8 * slot, S::WARPS);
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
            Epilogue<S, Codec> epilogue(step, plan, shared, slot_roots, slots, warp - S::WARPS, lane);
            epilogue.run();
        } else {
            Multiplier<S, Codec> walk(shared, ring, slots, warp, lane);
#pragma unroll 1
            for (int l = 0; l < step.layer_count; ++l) {
                const u32 round = l;
                const StepLayer& layer = step.layers[l];
                const int lane = opaque((int)threadIdx.x % 32), warp = opaque((int)threadIdx.x / 32);
#pragma unroll 1
                for (int product = QKV; product < PRODUCTS; ++product) {
                    const Share<S>& share = plan.shares[product];
                    if (product == QKV || product == GATE_UP) {
                        // Even where the block has no columns of the product, since it keeps the stream.
                        const bool first = product == QKV;
                        const Residual<S, Codec> residual{step, share, shared, warp, lane};
                        const StepLayer* from = !first ? &layer : l > 0 ? &layer - 1 : nullptr;
                        residual.run(from, first ? DOWN : OUTPUT, first && l > 0 ? round - 1 : round, first ? layer.attention_gamma : layer.mlp_gamma,
                                     !first, round);
                    } else if (share.tiles > 0) {
                        // Every block that reads messages also sends some that others wait for, so no message is overwritten before
                        // it is read.
                        if (product == OUTPUT) {
                            AttentionSource<S> source{step, plan, round};
                            stage(source, step, product, share, shared, warp, lane);
                        } else {
                            PlainSource source{step.mlp, round};
                            stage(source, step, product, share, shared, warp, lane);
                        }
                    }
                    meet<S>();
                    if (product == GATE_UP && threadIdx.x == 0) send(step.arrivals + blockIdx.x, 0.f, round);
                    walk.multiply(share, expected(step, share, product, round), slot_roots);
                    if (product == QKV) {
                        // Opaque, so that addresses are not kept in registers during the other products.
                        const Attention<S, Codec> attention{step, plan, shared, opaque(warp), opaque(lane)};
                        attention.run(walk, layer, l);
                    }
                }
            }
            // One block of each part stores the result.
            if (blockIdx.x < PARTS) {
                const Residual<S, Codec> residual{step, plan.shares[QKV], shared, warp, lane};
                residual.run(step.layers + step.layer_count - 1, DOWN, step.layer_count - 1, nullptr, 0, 0);
            }
        }
    }

private:
    // Messages that must have come before a product's sums are sent. qkv and gate_up: sums of squares of the row, for the norm's factor.
    // down: all blocks have reached gate_up, hence have read all earlier sums, whose memory later layers write again.
    static __device__ __forceinline__ Expected expected(const StepArguments& step, const Share<S>& share, int product, u32 round) {
        if (product == DOWN) return {step.arrivals, (int)gridDim.x, round, 0, 0.f};
        if (product == OUTPUT) return {nullptr, 0, round, 0, 0.f};
        return {squares_of(step, step.squares[product == GATE_UP], share.group), square_units(step), round, step.hidden, step.eps};
    }
    template <typename Source>
    static __device__ __forceinline__ void stage(Source& source, const StepArguments& step, int product, const Share<S>& share,
                                                 unsigned char* shared, int warp, int lane) {
        stage_activations<S, Codec>(source, step, share.first, share.units, step.shape[product].channels, shared + S::ACTIVATIONS_AT,
                                    warp, lane);
    }
};

#define INSTANTIATE_PERSISTENT_STEP(NAME, CONFIGURATION)                                                     \
    extern "C" __global__ void __launch_bounds__(PersistentStep<CONFIGURATION>::S::THREADS, 1)              \
    NAME(const __grid_constant__ StepArguments step) {                                                       \
        PersistentStep<CONFIGURATION>::run(step);                                                            \
    }
