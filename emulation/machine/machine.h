// The machine that runs a kernel: threads as fibers of one host thread, scheduled at random but reproducibly.
//
// Clusters of a grid run one after another, in any order; the threads of a cluster take turns. Where blocks wait for
// each other by flags in global memory, a few run at once, and start in the order of their numbers. A thread gives up
// its turn where it has to wait and, now and then, at synchronising instructions and at accesses to shared memory.
#pragma once
#include <array>
#include <csetjmp>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "clock.h"
#include "instructions.h"

namespace emulation {

constexpr unsigned LANES = 32;

struct Block;
struct Fiber;
typedef std::vector<Fiber*> Waiters;

// xorshift64*: reproducible everywhere, unlike the distributions of <random>.
struct Random {
    uint64_t state = 1;
    uint64_t next() {
        state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
        return state * 0x2545f4914f6cdd1dull;
    }
    unsigned below(size_t bound) { return static_cast<unsigned>((next() >> 33) % bound); }
    bool one_in(unsigned n) { return below(n) == 0; }
};

// The asynchronous products of a thread; see matrix.cpp.
struct Product {
    std::vector<float*> d;
    Inputs4 a;
    std::optional<Input<u32>> places;  // of a sparse operand A's columns, in the lanes that the selector names
    u32 selector;
    uint64_t descriptor;
    Element element;
    uint32_t fence;  // the thread's last one
};
struct Accumulators {
    std::vector<float*> home;
    std::vector<float> value;
    uint32_t fence;
    unsigned in_flight;
};
struct ProductQueue {
    std::vector<Product> open;
    std::vector<std::vector<Product>> groups;  // committed; empty once complete
    std::vector<Accumulators> accumulators;
    uint32_t completed_groups = 0, completed = 0, issued = 0;
    uint64_t history = 0;  // of what was issued, to compare the warps of a warpgroup
};

// A cp.async copy that has not landed yet; see copies.cpp.
struct ThreadCopy {
    uint32_t destination, valid;
    const unsigned char* source;
};
struct CopyQueue {
    std::vector<ThreadCopy> open;
    std::vector<std::vector<ThreadCopy>> groups;  // committed; empty once complete
    uint32_t completed_groups = 0;
};

struct Warp {
    Block* block = nullptr;
    unsigned index = 0;
    uint64_t priority = 0;
    std::vector<Fiber*> runnable;
    // The warp-wide instruction that is being gathered.
    const char* gathering = nullptr;
    unsigned arrived = 0, generation = 0;
    std::array<void*, LANES> operands{};
    Waiters waiters;
};

struct Fiber {
    Block* block = nullptr;
    Warp* warp = nullptr;
    unsigned thread = 0, lane = 0;
    bool started = false, finished = false;
    jmp_buf context;
    char* stack = nullptr;
    uint32_t* stamps = nullptr;  // for every word of the stack, the machine's count of fences at its last write
    uint32_t last_fence = 0;     // that count after this thread's last wgmma.fence
    Clock clock;
    // What it waits for, for the report of a deadlock: a function, and what that is called with, on the thread's stack.
    std::string (*reason)(const void*) = nullptr;
    const void* waits_for = nullptr;
    unsigned cluster_arrivals = 0;
    unsigned registers = 0;
    CopyQueue copies;
    ProductQueue products;
    uint64_t looked_at_stores = ~0ull;  // how many messages had been written when it looked at one last
    uint32_t last_flag = ~0u, last_stores = 0;  // the flag it looked at last, and how often that had been stored to
};

// An mbarrier object; see barriers.cpp.
struct MemoryBarrier {
    unsigned index = 0, count = 0, pending = 0, completed_phases = 0;
    int64_t bytes = 0;
    int64_t bytes_in_flight = 0;
    bool visible_to_copies = false;
    bool fed_by_other_blocks = false;
    unsigned fenced_before_arrival = 0;  // at the cluster's barrier, counted from 1: its creator's first after the fence
    const Fiber* creator = nullptr;
    Moment created;
    Clock released, gathered;
    Waiters waiters;
};

// One of a block's sixteen numbered barriers.
struct NumberedBarrier {
    unsigned threads = 0, arrived = 0, generation = 0;
    Clock released, gathered;
    Waiters waiters;
};

// Two bytes of shared memory: what they hold and who touched them last. Reads keep the latest few.
struct Granule {
    enum State : uint8_t { UNWRITTEN, WRITTEN, IN_FLIGHT, BARRIER };
    static constexpr unsigned READS = 3;
    Moment write;
    std::array<Moment, READS> reads;
    State state = UNWRITTEN;
    bool by_thread = false;  // last written by a thread's own instruction, not by a bulk copy
};

struct Block {
    unsigned index = 0, rank = 0;
    unsigned place = 0;  // among the blocks that run at once: where its threads have their stacks, and it its memory
    std::vector<Warp> warps;
    std::vector<std::unique_ptr<Fiber>> fibers;
    unsigned running = 0;
    unsigned char* shared = nullptr;
    std::vector<Granule> granules;
    uint32_t dynamic_at = 0, shared_end = 0;
    std::map<uint32_t, MemoryBarrier> barriers;
    std::array<NumberedBarrier, 16> numbered;
    Clock gathered_for_cluster;
    std::vector<Clock> released_by_cluster;  // by how many phases of the cluster's barrier have ended
    unsigned spare_registers = 0;
    Waiters register_waiters;
};

// Who wrote two bytes of global memory, and when by the clock of the writer's block.
struct GlobalWrite {
    bool written = false;
    unsigned block = 0;
    Moment moment;
};

// A word of global memory by which blocks wait for each other; see flags.cpp.
struct Flag {
    struct Release {
        unsigned block;
        Clock clock;
    };
    std::vector<Release> releases;
    bool released = false;  // whether what it holds was stored with a release
    uint32_t stores = 0;
    Waiters waiters;
};

// A tensor copy or a store to another block, in flight.
struct BulkCopy {
    Block* block;
    uint32_t destination, bytes, barrier;
    std::vector<unsigned char> data;
};

struct Machine {
    Launch launch{};
    Image image{};
    unsigned threads = 0, cluster = 0;
    Random random;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<Warp*> runnable;  // warps with a runnable thread
    std::vector<BulkCopy> copies;
    unsigned copy_eagerness = 0;   // cp.async lands at once in this many of four cases
    bool skewed = false;           // favour some warps over others
    uint64_t engine_priority = 0;  // of the asynchronous copies, where skewed
    uint32_t fences = 0;           // wgmma.fence instructions so far, of all threads
    bool previous_ended = true;
    Waiters previous_waiters;
    unsigned cluster_arrived = 0, cluster_generation = 0;
    Waiters cluster_waiters;
    std::map<unsigned, uint32_t> static_variables;  // offsets
    std::map<ptrdiff_t, std::vector<GlobalWrite>> writes;  // of a writable range: of every two bytes
    std::vector<Flag> flags;
    uint32_t static_end = 0, static_bytes = 0, dynamic_at = 0;
    uint64_t message_stores = 0, idle_looks = 0;  // looks at messages since the last was written
};

extern Machine machine;
extern Fiber* self;  // the thread whose turn it is

// Agents of a block's clocks: its threads, and what works for them asynchronously.
struct Agents {
    static constexpr unsigned MAX_BARRIERS = 96;
    static unsigned copies_of(const Fiber& f) { return machine.threads + f.thread; }
    static unsigned products_of(const Warp& w) { return 2 * machine.threads + w.index; }
    static unsigned barrier(unsigned index) { return 2 * machine.threads + machine.threads / LANES + index; }
    static unsigned other_blocks() { return barrier(MAX_BARRIERS); }
    static unsigned previous_kernel() { return barrier(MAX_BARRIERS) + 1; }
    // The clocks of all blocks count the releases of every flag that they know of.
    static unsigned flag(size_t index) { return barrier(MAX_BARRIERS) + 2 + static_cast<unsigned>(index); }
    static unsigned number() { return flag(machine.flags.size()); }
    static std::string name(Moment moment);
};

// Ends the run with a message; printf's format. The thread and the kernel's source line are added.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string format(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Gives up the turn.
void suspend();
// Gives up the turn until `ready()`; whoever makes it so calls wake_all on the same waiters.
template <typename READY, typename REASON>
void wait_until(Waiters& waiters, const READY& ready, const REASON& reason) {
    if (ready()) return;
    self->reason = [](const void* reason) -> std::string { return (*static_cast<const REASON*>(reason))(); };
    self->waits_for = &reason;
    do {
        waiters.push_back(self);
        suspend();
    } while (!ready());
}
void wake_all(Waiters& waiters);
// Gives up the turn in one of `n` cases.
void maybe_yield(unsigned n);

// The present moment of the running thread; `release` starts a new one, so that later accesses are not covered by what
// was handed over.
Moment now();
void release();

// A warp-wide instruction (".sync.aligned"): the last lane to come acts for all, with every lane's operands.
void gather(const char* instruction, void* operands, void (*act)(Warp& warp, void* const* operands));

// Lets every lane of a warp know what the others know.
void join_lanes(Warp& warp);

// Copies that complete on an mbarrier: the agent's moment, the request, the landing.
Moment copy_moment(uint32_t barrier);
void begin_copy(uint32_t barrier, uint32_t bytes, const char* instruction);
// The same for a store to another block of the cluster, at a moment that block's barrier of the cluster has shown us.
Moment begin_store(Block& block, uint32_t barrier, uint32_t bytes, const char* instruction);
void end_copy(Block& block, uint32_t barrier, uint32_t bytes);
void land_one_copy();

// Whether what a thread of another block, or of this one, did at a moment of its block is over for the running thread.
bool known(unsigned block, Moment moment);
void make_flags();

// What must hold when a thread or a block ends.
void check_copies_at_exit(const Fiber& fiber);
void check_products_at_exit(const Fiber& fiber);
void check_warpgroups(const Block& block);
void check_barriers_at_end(const Block& block);

}  // namespace emulation
