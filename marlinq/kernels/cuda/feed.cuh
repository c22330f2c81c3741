// A ring of stages in shared memory and the thread that fills it, for the kernels built on tensor copies.
//
// A stage is one chunk of CHUNK channels: TILE_M rows of activations, ROWS rows of weights (a row is the TILES * 64
// columns of 16 channels), and the chunk's groups of scales and zero points. One thread orders all of it with three to
// five instructions; a stage is handed over by two barriers:
//
//   full    the copies' bytes have arrived                     empty    the warps that multiply the chunk are done
//
// Channels and columns outside a tensor arrive as zeros and count as bytes. Rows of activations beyond the batch stay what they
// are, and what they give is not stored: boxes end with the batch, since zeros for missing rows arrive later than rows that
// exist (docs/kernels/notes.md, "Rows beyond the batch").
//
// Of the ring's chunks no more than WINDOW are on their way at once: memory that is asked for more than it needs to be busy
// gives less (docs/kernels/notes.md, "Chunks on their way").
//
// The including file defines TILES, TILE_M, ROWS, GROUP (0: channelwise, whose scales don't travel here), ZEROS, STAGES, WINDOW.
#pragma once
#include "hopper.cuh"

constexpr int CHUNK = 16 * ROWS;
constexpr int SLABS = CHUNK / 64;  // 128-byte rows of activations
constexpr int GROUPS = GROUP == 0 || GROUP > CHUNK ? 1 : CHUNK / GROUP;  // groups of scales in a chunk
constexpr int GROUP_ROWS = ROWS / GROUPS;
constexpr int TILE_N = 64 * TILES;

// Bytes of a stage: activations first, whose swizzle wants 1024-byte alignment.
constexpr int SLAB_BYTES = TILE_M * 128;
constexpr int ROW_BYTES = TILES * 512;
constexpr int SCALE_BYTES = TILES * 128;  // of one group
constexpr int WEIGHTS_AT = SLABS * SLAB_BYTES;
constexpr int SCALES_AT = WEIGHTS_AT + ROWS * ROW_BYTES;
constexpr int ZEROS_AT = SCALES_AT + (GROUP == 0 ? 0 : GROUPS * SCALE_BYTES);
constexpr int COPIED_BYTES = ZEROS_AT + (GROUP == 0 || !ZEROS ? 0 : GROUPS * SCALE_BYTES);
constexpr int STAGE_BYTES = (COPIED_BYTES + 1023) / 1024 * 1024;
// Chunks that a dependent launch requests before the wait for the previous kernel. More bytes than these would hold up that
// kernel's own requests (docs/kernels/notes.md, "Dependent chain").
constexpr int AHEAD_BYTES = 65536;
constexpr int AHEAD = STAGE_BYTES > AHEAD_BYTES ? 1 : AHEAD_BYTES / STAGE_BYTES < WINDOW ? AHEAD_BYTES / STAGE_BYTES : WINDOW;
static_assert(0 < WINDOW && WINDOW <= STAGES, "what is on its way has a stage");
static_assert(SLAB_BYTES % 1024 == 0 && CHUNK % 64 == 0, "slabs hold whole swizzle atoms");

// Maps of x [M, K] with boxes of 64 columns, swizzled, and a tile's rows, or all rows of a batch that is smaller; and of those
// that whole tiles leave.
struct ActivationMaps {
    TensorMap tile, rest;
};

// Maps of words [K/16, N/64, 128] and of scales and zeros [G, N/64, 64].
struct WeightMaps {
    TensorMap words, scales, zeros;
};

// The ring in shared memory, and a walk round it. `parity` is that of the phase to wait for.
struct Ring {
    u32 stages, full, empty;  // addresses: of the first stage, and of STAGES barriers each
    int stage;
    u32 parity;

    // `barriers` is the address of 2 * STAGES of them. The one who fills starts at parity 1: a new barrier counts as past its
    // odd phase.
    __device__ __forceinline__ Ring(const void* memory, u32 barriers, bool fills)
        : stages((shared_address(memory) + 1023) / 1024 * 1024),
          full(barriers),
          empty(full + 8 * STAGES),
          stage(0),
          parity(fills) {}

    // The barriers of stages from .. to - 1.
    __device__ __forceinline__ void init(int from, int to, int readers) const {
        for (int s = from; s < to; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, readers);
        }
        barrier_init_fence();
    }
    __device__ __forceinline__ u32 address() const { return stages + stage * STAGE_BYTES; }
    __device__ __forceinline__ void wait_full() const { barrier_wait(full + 8 * stage, parity); }
    __device__ __forceinline__ void wait_empty() const { barrier_wait(empty + 8 * stage, parity); }
    __device__ __forceinline__ void release() const { barrier_arrive(empty + 8 * stage); }
    // At most STAGES on.
    __device__ __forceinline__ void advance(int by = 1) {
        stage += by;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }
};

// How many chunks are on their way, and the first of them.
struct Window {
    Ring first;
    int chunks;

    // With none yet, of the ring that is to be filled.
    __device__ __forceinline__ explicit Window(const Ring& ring) : first(ring), chunks(0) { first.parity = 0; }

    // Until there is room for one more.
    __device__ __forceinline__ void admit() {
        if (WINDOW == STAGES) return;  // a free stage is room enough
        if (chunks < WINDOW) {
            ++chunks;
        } else {
            first.wait_full();
            first.advance();
        }
    }
};

// What the filling thread copies from: chunks of one column tile and one batch tile.
struct Feed {
    const TensorMap* x;
    const WeightMaps& maps;
    int m0, tile;  // first row of the batch, first 64-column tile
    u32 bytes;     // of a stage

    __device__ __forceinline__ Feed(const ActivationMaps& activations, const WeightMaps& weights, int M, int m0, int n0)
        : x(m0 > 0 && M - m0 < TILE_M ? &activations.rest : &activations.tile),
          maps(weights),
          m0(m0),
          tile(n0 / 64),
          bytes(COPIED_BYTES - SLABS * 128 * max(TILE_M - (M - m0), 0)) {}

    __device__ __forceinline__ static int group_of(int chunk) { return GROUP == 0 ? 0 : chunk * CHUNK / (GROUP == 0 ? 1 : GROUP); }

    __device__ __forceinline__ void copy_weights(const Ring& ring, int chunk) const {
        const u32 at = ring.address(), barrier = ring.full + 8 * ring.stage;
        barrier_expect(barrier, bytes);
        copy_box_once(at + WEIGHTS_AT, &maps.words, 0, tile, chunk * ROWS, barrier);
        if (GROUP != 0) copy_box_once(at + SCALES_AT, &maps.scales, 0, tile, group_of(chunk), barrier);
        if (GROUP != 0 && ZEROS) copy_box_once(at + ZEROS_AT, &maps.zeros, 0, tile, group_of(chunk), barrier);
    }
    __device__ __forceinline__ void copy_activations(const Ring& ring, int chunk) const {
        const u32 at = ring.address(), barrier = ring.full + 8 * ring.stage;
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
            copy_box(at + slab * SLAB_BYTES, x, chunk * CHUNK + slab * 64, m0, barrier);
    }

    // Of the chunks begin .. begin + count - 1, the first one's weights: they depend on no earlier kernel, and the filling
    // thread alone, so that they are requested before the block has met.
    __device__ __forceinline__ void start(const Ring& ring, int begin, int count) const {
        if (count > 0) copy_weights(ring, begin);
    }
    // What `start` has begun. A dependent launch requests more weights before its wait for the previous kernel.
    __device__ __forceinline__ void go_on(Ring& ring, Window& window, int begin, int count, bool dependent) const {
        const Ring first = ring;
        const int ahead = min(dependent ? AHEAD : 1, count);
#pragma unroll 1
        for (int i = 0; i < ahead; ++i, ring.advance())
            if (i > 0) copy_weights(ring, begin + i);
        if (dependent) wait_for_previous_kernel();
        ring = first;
#pragma unroll 1
        for (int i = 0; i < ahead; ++i, ring.advance()) copy_activations(ring, begin + i);
        window.chunks = ahead;
        fill(ring, window, begin + ahead, count - ahead);
    }
    __device__ __forceinline__ void fill(Ring& ring, Window& window, int begin, int count) const {
#pragma unroll 1
        for (int i = 0; i < count; ++i, ring.advance()) {
            window.admit();
            ring.wait_empty();
            copy_weights(ring, begin + i);
            copy_activations(ring, begin + i);
        }
    }
};
