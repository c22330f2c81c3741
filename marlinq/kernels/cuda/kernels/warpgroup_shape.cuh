// Constants derived from a configuration of the warpgroup kernel: tiles, roles of warps, memory.
#pragma once
#include "codec/codecs.cuh"
#include "epilogue/activation.cuh"
#include "epilogue/store_warps.cuh"
#include "epilogue/transposed_store.cuh"
#include "reduce/dsmem_push.cuh"
#include "scale/scaling.cuh"
#include "tma/stage_layout.cuh"

template <typename C, typename Rows = SixteenBits>
struct WarpgroupShape {
    typedef typename C::Codec Codec;
    typedef typename Codec::Element E;

    static constexpr int TILE_M = C::TILE_M, WORDS = C::WORDS, WARPGROUPS_N = C::WARPGROUPS_N, PARTS_K = C::PARTS_K;
    static constexpr int CLUSTER = C::CLUSTER, QUANT_GROUP = C::QUANT_GROUP;
    static constexpr int CONSUMER_REGISTERS = C::CONSUMER_REGISTERS, PRODUCER_REGISTERS = C::PRODUCER_REGISTERS;
    static constexpr bool ZEROS = C::ZEROS, STREAM_K = C::STREAM_K, STORE_WARPS = C::STORE_WARPS, PUSH_SUMS = C::PUSH_SUMS;
    static constexpr Scaling SCALING = C::SCALING;

    typedef StageLayout<C, TILE_M, WARPGROUPS_N * WORDS, Rows> Layout;
    static constexpr int STAGES = Layout::STAGES, ROWS = Layout::ROWS, CHUNK = Layout::CHUNK, TILE_N = Layout::TILE_N;

    static constexpr int PRODUCTS = WORDS;                    // of a warpgroup per row of 16 channels
    static constexpr int CONSUMERS = WARPGROUPS_N * PARTS_K;  // warpgroups that multiply
    static constexpr int THREADS = 128 * (CONSUMERS + 1);
    static constexpr int PARTS = PARTS_K * CLUSTER;
    // Whether sums of several warpgroups or blocks meet in shared memory: where K is split, and always with an activation, since
    // gate and up belong to different warps.
    static constexpr bool SPLIT = PARTS > 1 || C::PAIR_ACTIVATION != Activation::NONE;
    static constexpr bool SCALED_GROUPS = SCALING == Scaling::SUMS && QUANT_GROUP != 0;
    static constexpr bool NORMALIZED = SCALING == Scaling::FUSED && Codec::NORMALIZES;
    static constexpr bool FEW_REGISTERS = PRODUCTS * TILE_M * (1 + SCALED_GROUPS) > 256;

    static_assert(STAGES % PARTS_K == 0, "a stage belongs to one part, which then sees all of its phases");
    static_assert(STAGES >= 2 * PARTS_K, "a part begins its next chunk before it gives the last one back");
    static_assert(ROWS > 2 || STAGES >= 3 * PARTS_K, "of chunks of two rows it waits for the one behind that, too");
    static_assert(SCALING != Scaling::SUMS || QUANT_GROUP == 0 || QUANT_GROUP == CHUNK, "sums are scaled at chunk ends");
    static_assert(SCALING != Scaling::FUSED || Codec::FUSES, "the codec has no fused instruction");
    static_assert(SCALING != Scaling::FUSED || (QUANT_GROUP != 0 && !ZEROS),
                  "the fused instruction takes scales of quantisation groups, and zero points of 8");
    static_assert(!PUSH_SUMS || CLUSTER > 1, "sums are pushed to other blocks");
    static_assert(C::PAIR_ACTIVATION == Activation::NONE || !PUSH_SUMS, "pushed sums meet no other columns");
    static_assert(!STREAM_K || !SPLIT, "stream-K splits K in no other way");
    static_assert(!STORE_WARPS || !SPLIT, "other warps store whole tiles only");

    // Where K is split: pushed sums, or a buffer of floats [part][m][PITCH] in the memory of the ring.
    typedef PushedSums<E, TILE_M, TILE_N, PARTS, CLUSTER> Push;
    static constexpr int PITCH = TILE_N + 4;  // against bank conflicts
    static constexpr int BUFFER_BYTES = PARTS_K * TILE_M * PITCH * 4;

    // Elsewhere every multiplying warpgroup has memory of its own for the epilogue.
    static constexpr int WARPGROUP_COLUMNS = 64 * WORDS;
    typedef TransposedStore<E, PRODUCTS, TILE_M> Transposed;
    typedef StoreWarps<WARPGROUP_COLUMNS, TILE_M> Stored;
    static constexpr int STORED_BYTES = STORE_WARPS ? Stored::BYTES : 0;
    static constexpr int EPILOGUE_BYTES = STORED_BYTES > 4 * Transposed::BYTES ? STORED_BYTES : 4 * Transposed::BYTES;

    static constexpr int ALIGNED_RING_BYTES = Layout::RING_BYTES + Layout::ALIGNMENT_BYTES;
    static constexpr int SHARED_BYTES = PUSH_SUMS ? ALIGNED_RING_BYTES + Push::BYTES
                                        : !SPLIT  ? ALIGNED_RING_BYTES + WARPGROUPS_N * EPILOGUE_BYTES
                                        : ALIGNED_RING_BYTES > BUFFER_BYTES ? ALIGNED_RING_BYTES
                                                                            : BUFFER_BYTES;
    static_assert(C::SHARED_BYTES == SHARED_BYTES, "host and kernel count different bytes of shared memory");
};
