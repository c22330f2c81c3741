// The ring of stages in shared memory. The TMA producer and the warps that multiply hand a stage to each other by two
// mbarriers:
//
//   full    the copies' bytes have arrived                     empty    the warps that multiply the chunk are done
#pragma once
#include "fault_site.cuh"
#include "ptx/barrier.cuh"

// The ring, and a walk round it. `parity` is that of the phase to wait for.
template <typename Layout>
struct Ring {
    static constexpr int STAGES = Layout::STAGES;

    u32 stages, full, empty;  // addresses: of the first stage, and of STAGES barriers each
    int stage;
    u32 parity;

    // `barriers` is the address of 2 * STAGES of them. The producer starts at parity 1: a new barrier counts as past its odd
    // phase.
    __device__ __forceinline__ Ring(const void* memory, u32 barriers, bool produces)
        : stages(FAULT_SITE(ring_alignment, (shared_address(memory) + 1023) / 1024 * 1024)),
          full(barriers),
          empty(full + 8 * STAGES),
          stage(0),
          parity(produces) {}

    // The barriers of stages from .. to - 1, whose chunks `readers` warps release.
    __device__ __forceinline__ void init(int from, int to, int readers) const {
        for (int s = from; s < to; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, readers);
        }
        FAULT_SITE(ring_fence, barrier_init_fence();)
    }
    __device__ __forceinline__ u32 address() const { return stages + stage * Layout::BYTES; }
    __device__ __forceinline__ void wait_full() const { barrier_wait(full + 8 * stage, parity); }
    __device__ __forceinline__ void wait_empty() const { barrier_wait(empty + 8 * stage, parity); }
    __device__ __forceinline__ void release() const { barrier_arrive(empty + 8 * stage); }
    // At most STAGES on.
    __device__ __forceinline__ void advance(int by = 1) {
        stage += by;
        if (stage >= STAGES) FAULT_SITE(ring_parity, stage -= STAGES, parity ^= 1);
    }
};

// Limits the chunks in flight to WINDOW of the ring's STAGES: more bytes in flight than keep the memory busy lower the
// achieved bandwidth (docs/kernels.md, "Chunks in flight").
template <typename Layout>
struct Window {
    Ring<Layout> first;  // chunk in flight
    int chunks;          // in flight

    // With none yet, of the ring that is to be filled.
    __device__ __forceinline__ explicit Window(const Ring<Layout>& ring) : first(ring), chunks(0) { first.parity = 0; }

    // Waits until one more may be requested.
    __device__ __forceinline__ void admit() {
        if (Layout::WINDOW == Layout::STAGES) return;  // a free stage is room enough
        if (chunks < Layout::WINDOW) {
            ++chunks;
        } else {
            first.wait_full();
            first.advance();
        }
    }
};
