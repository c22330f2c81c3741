// Everything that makes threads wait for each other.
#include <algorithm>

#include "machine.h"
#include "memory.h"

namespace emulation {

namespace {

MemoryBarrier& barrier_at(Block& block, u32 address, const char* instruction) {
    const auto found = block.barriers.find(address);
    if (found == block.barriers.end()) fail("%s at %u, where no mbarrier was initialised", instruction, address);
    // Its creation is a write that whoever uses the barrier must know of.
    if (!found->second.created.before(self->clock))
        fail("%s without waiting for the initialisation of the mbarrier", instruction);
    return found->second;
}

// The current phase ends when nothing is pending: no arrival, no byte.
void end_phase_if_done(MemoryBarrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    if (barrier.bytes_in_flight)
        fail("phase %u of an mbarrier ends with copies of %lld bytes in flight: fewer bytes were expected than copied",
             barrier.completed_phases, static_cast<long long>(barrier.bytes_in_flight));
    ++barrier.completed_phases;
    barrier.pending = barrier.count;
    barrier.released.join(barrier.gathered);
    wake_all(barrier.waiters);
}

void arrive(u32 address, int64_t expected, const char* instruction) {
    MemoryBarrier& barrier = barrier_at(*self->block, address, instruction);
    if (!barrier.pending) fail("%s on an mbarrier that has all the phase's arrivals", instruction);
    barrier.bytes += expected;
    // The range of a tx-count (PTX ISA, "mbarrier: tx-count").
    if (barrier.bytes >= 1 << 20) fail("%s makes an mbarrier expect %lld bytes", instruction, (long long)barrier.bytes);
    --barrier.pending;
    barrier.gathered.join(self->clock);
    release();
    end_phase_if_done(barrier);
    maybe_yield(4);
}

// Clocks of different blocks have the end of the previous kernel in common, and nothing else.
void pass_on_previous_kernel(Clock& to, const Clock& from) {
    uint32_t& known = to.counts[Agents::previous_kernel()];
    known = std::max(known, from.counts[Agents::previous_kernel()]);
}

// Instructions that are ".aligned" want whole warps, all lanes at the same one.
void align(const char* instruction) {
    gather(instruction, nullptr, [](Warp&, void* const*) {});
}

}  // namespace

void join_lanes(Warp& warp) {
    Clock joined = self->clock;
    const auto first = warp.block->fibers.begin() + warp.index * LANES;
    for (unsigned lane = 0; lane < LANES; ++lane) joined.join(first[lane]->clock);
    for (unsigned lane = 0; lane < LANES; ++lane) {
        first[lane]->clock = joined;
        ++first[lane]->clock.counts[first[lane]->thread];
    }
}

std::string describe_barrier(const Block& block, uint32_t address) {
    const MemoryBarrier& barrier = block.barriers.at(address);
    std::string text =
        format("mbarrier %u, whose phase %u lacks %u of %u arrivals and %lld bytes", barrier.index,
               barrier.completed_phases, barrier.pending, barrier.count, static_cast<long long>(barrier.bytes));
    if (barrier.bytes && !barrier.bytes_in_flight) text += " that no copy will bring";
    return text;
}

// mbarrier (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").

void barrier_init(u32 address, u32 arrivals) {
    if (address % 8) fail("mbarrier.init at an address that is no multiple of 8");
    if (arrivals < 1 || arrivals >= 1 << 20) fail("mbarrier.init with %u arrivals", arrivals);
    make_barrier_bytes(address);
    MemoryBarrier& barrier = self->block->barriers[address];
    barrier.index = static_cast<unsigned>(self->block->barriers.size() - 1);
    if (barrier.index >= Agents::MAX_BARRIERS) fail("the emulation has %u mbarriers", Agents::MAX_BARRIERS);
    barrier.count = barrier.pending = arrivals;
    barrier.creator = self;
    barrier.created = now();
    barrier.released.counts.resize(Agents::number());
    barrier.gathered.counts.resize(Agents::number());
}

// Copies are another proxy: they see an initialisation only behind this fence.
void barrier_init_fence() {
    for (auto& [address, barrier] : self->block->barriers)
        if (barrier.creator == self && !barrier.visible_to_copies) {
            barrier.visible_to_copies = true;
            barrier.fenced_before_arrival = self->cluster_arrivals + 1;
        }
}

void barrier_arrive(Sink, u32 address) { arrive(address, 0, "mbarrier.arrive"); }

void barrier_arrive_expect(Sink, u32 address, u32 bytes) {
    arrive(address, bytes, "mbarrier.arrive.expect_tx");
}

void barrier_try_wait(Output<bool> done, u32 address, u32 parity, bool cluster_scope) {
    Block& block = *self->block;
    MemoryBarrier& barrier = barrier_at(block, address, "mbarrier.try_wait");
    if (parity > 1) fail("mbarrier.try_wait for parity %u", parity);
    // The phase before the first counts as complete and has parity 1.
    const auto complete = [&] { return barrier.completed_phases % 2 != parity; };
    // The instruction may give up after a while, so it takes a loop.
    if (!complete() && machine.random.one_in(8)) {
        done.set(false);
        maybe_yield(1);
        return;
    }
    wait_until(barrier.waiters, complete, [&block, &parity, at = address] {
        return format("parity %u of %s", parity, describe_barrier(block, at).c_str());
    });
    if (barrier.fed_by_other_blocks && !cluster_scope)
        fail("mbarrier.try_wait acquires what other blocks stored; that takes .acquire.cluster");
    self->clock.join(barrier.released);
    self->clock.counts[Agents::barrier(barrier.index)] = barrier.completed_phases;
    done.set(true);
    maybe_yield(8);
}

void begin_copy(uint32_t address, uint32_t bytes, const char* instruction) {
    MemoryBarrier& barrier = barrier_at(*self->block, address, instruction);
    if (!barrier.visible_to_copies)
        fail("%s on an mbarrier whose initialisation no fence has made visible to copies", instruction);
    barrier.bytes_in_flight += bytes;
    // Who sees the copy complete has seen what its requester did before.
    barrier.gathered.join(self->clock);
    release();
}

Moment begin_store(Block& block, uint32_t address, uint32_t bytes, const char* instruction) {
    const bool own = &block == self->block;
    const auto found = block.barriers.find(address);
    const Clock& known = own ? self->clock : block.released_by_cluster[self->clock.counts[Agents::other_blocks()]];
    // The fence of the initialisation reaches others through the cluster's barrier whether that orders memory or not.
    const auto fenced = [&](const MemoryBarrier& barrier) {
        return barrier.visible_to_copies &&
               barrier.fenced_before_arrival <= self->clock.counts[Agents::other_blocks()];
    };
    if (found == block.barriers.end() || !(found->second.created.before(known) || (!own && fenced(found->second))))
        fail("%s to block %u without waiting for the initialisation of its mbarrier", instruction, block.index);
    MemoryBarrier& barrier = found->second;
    if (!barrier.visible_to_copies)
        fail("%s on an mbarrier whose initialisation no fence has made visible to other blocks", instruction);
    barrier.bytes_in_flight += bytes;
    if (own) {
        barrier.gathered.join(self->clock);
    } else {
        barrier.fed_by_other_blocks = true;
        pass_on_previous_kernel(barrier.gathered, self->clock);
    }
    release();
    return {Agents::barrier(barrier.index), barrier.completed_phases + 1};
}

Moment copy_moment(uint32_t address) {
    const MemoryBarrier& barrier = barrier_at(*self->block, address, "a bulk copy");
    return {Agents::barrier(barrier.index), barrier.completed_phases + 1};
}

void end_copy(Block& block, uint32_t address, uint32_t bytes) {
    MemoryBarrier& barrier = block.barriers.at(address);
    barrier.bytes -= bytes;
    barrier.bytes_in_flight -= bytes;
    if (barrier.bytes <= -(1 << 20)) fail("an mbarrier got %lld bytes that nobody expected", -(long long)barrier.bytes);
    end_phase_if_done(barrier);
}

void check_barriers_at_end(const Block& block) {
    for (const auto& [address, barrier] : block.barriers)
        if (barrier.bytes)
            fail("block %u ends with %s", block.index, describe_barrier(block, address).c_str());
}

#if defined(__x86_64__) && !defined(__clang__)
__attribute__((target_clones("avx2", "default"), optimize("O3")))
#endif
void raise_to(uint32_t* __restrict__ mine, const uint32_t* __restrict__ theirs, size_t size) {
    for (size_t i = 0; i < size; ++i) mine[i] = mine[i] > theirs[i] ? mine[i] : theirs[i];
}

// bar.sync ("bar, barrier").

void block_barrier(u32 index, u32 threads) {
    if (index >= 16 || !threads || threads % LANES) fail("bar.sync %u, %u", index, threads);
    align("bar.sync");
    NumberedBarrier& barrier = self->block->numbered[index];
    if (barrier.arrived && barrier.threads != threads)
        fail("bar.sync %u for %u threads while others wait there for %u", index, threads, barrier.threads);
    barrier.threads = threads;
    barrier.gathered.join(self->clock);
    release();
    const unsigned generation = barrier.generation;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        ++barrier.generation;
        barrier.released = barrier.gathered;
        std::fill(barrier.gathered.counts.begin(), barrier.gathered.counts.end(), 0);
        wake_all(barrier.waiters);
    } else {
        wait_until(
            barrier.waiters, [&] { return barrier.generation != generation; },
            [&] { return format("barrier %u, where %u of %u threads are", index, barrier.arrived, threads); });
    }
    self->clock.join(barrier.released);
}

// barrier.cluster.

// With `ordered` what was done before is visible to those who wait; without, they know only that everybody has come.
static void arrive_at_cluster(bool ordered) {
    align("barrier.cluster.arrive");
    if (self->cluster_arrivals != self->clock.counts[Agents::other_blocks()])
        fail("barrier.cluster.arrive a second time without a wait");
    if (ordered) {
        self->block->gathered_for_cluster.join(self->clock);
        release();
    }
    ++self->cluster_arrivals;
    if (++machine.cluster_arrived == machine.threads * machine.cluster) {
        machine.cluster_arrived = 0;
        ++machine.cluster_generation;
        for (const auto& block : machine.blocks)
            for (const auto& other : machine.blocks)
                pass_on_previous_kernel(block->gathered_for_cluster, other->gathered_for_cluster);
        for (const auto& block : machine.blocks) block->released_by_cluster.push_back(block->gathered_for_cluster);
        wake_all(machine.cluster_waiters);
    }
    maybe_yield(4);
}

void cluster_arrive() { arrive_at_cluster(true); }

void cluster_arrive_relaxed() { arrive_at_cluster(false); }

void cluster_wait() {
    align("barrier.cluster.wait");
    if (self->cluster_arrivals == self->clock.counts[Agents::other_blocks()])
        fail("barrier.cluster.wait without an arrival");
    wait_until(
        machine.cluster_waiters, [] { return machine.cluster_generation >= self->cluster_arrivals; },
        [] {
            return format("the cluster's barrier, where %u of %u threads are", machine.cluster_arrived,
                          machine.threads * machine.cluster);
        });
    self->clock.join(self->block->released_by_cluster[self->cluster_arrivals]);
    self->clock.counts[Agents::other_blocks()] = self->cluster_arrivals;
}

// griddepcontrol.

void wait_for_previous_kernel() {
    wait_until(
        machine.previous_waiters, [] { return machine.previous_ended; }, [] { return "the previous kernel"; });
    self->clock.counts[Agents::previous_kernel()] = 1;
}

// setmaxnreg: registers of a block move between its threads; who wants more waits until others have given them up.

void registers_shrink(u32 count) {
    align("setmaxnreg.dec");
    if (count % 8 || count < 24 || count > self->registers)
        fail("setmaxnreg.dec to %u registers from %u", count, self->registers);
    self->block->spare_registers += self->registers - count;
    self->registers = count;
    wake_all(self->block->register_waiters);
}

void registers_grow(u32 count) {
    align("setmaxnreg.inc");
    if (count % 8 || count > 256 || count < self->registers)
        fail("setmaxnreg.inc to %u registers from %u", count, self->registers);
    Block& block = *self->block;
    const u32 wanted = count - self->registers;
    wait_until(
        block.register_waiters, [&] { return block.spare_registers >= wanted; },
        [&] { return format("%u registers a thread, the block can spare %u", wanted, block.spare_registers); });
    block.spare_registers -= wanted;
    self->registers = count;
}

}  // namespace emulation

void __syncthreads() { emulation::block_barrier(0u, emulation::machine.threads); }

// __syncwarp orders memory among the lanes (bar.warp.sync).
void __syncwarp(unsigned mask) {
    using namespace emulation;
    if (mask != 0xffffffffu) fail("__syncwarp of some lanes only, mask %#x", mask);
    gather("__syncwarp", self, [](Warp& warp, void* const*) { join_lanes(warp); });
}

unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    using namespace emulation;
    if (mask != 0xffffffffu) fail("__reduce_add_sync of some lanes only, mask %#x", mask);
    gather("__reduce_add_sync", &value, [](Warp&, void* const* values) {
        unsigned sum = 0;
        for (unsigned lane = 0; lane < LANES; ++lane) sum += *static_cast<unsigned*>(values[lane]);
        for (unsigned lane = 0; lane < LANES; ++lane) *static_cast<unsigned*>(values[lane]) = sum;
    });
    return value;
}

void emulation::largest_of_warp(Output<u32> result, u32 value, u32 mask) {
    if (mask != 0xffffffffu) fail("redux.sync of some lanes only, mask %#x", mask);
    gather("redux.sync", &value, [](Warp&, void* const* values) {
        u32 most = 0;
        for (unsigned lane = 0; lane < LANES; ++lane) most = std::max(most, *static_cast<u32*>(values[lane]));
        for (unsigned lane = 0; lane < LANES; ++lane) *static_cast<u32*>(values[lane]) = most;
    });
    result.set(value);
}
void emulation::sum_of_warp(Output<u32> result, u32 value, u32 mask) {
    if (mask != 0xffffffffu) fail("redux.sync of some lanes only, mask %#x", mask);
    gather("redux.sync", &value, [](Warp&, void* const* values) {
        u32 sum = 0;
        for (unsigned lane = 0; lane < LANES; ++lane) sum += *static_cast<u32*>(values[lane]);
        for (unsigned lane = 0; lane < LANES; ++lane) *static_cast<u32*>(values[lane]) = sum;
    });
    result.set(value);
}

void emulation::lanes_with_same(Output<u32> result, u32 value, u32 mask) {
    if (mask != 0xffffffffu) fail("match.any.sync of some lanes only, mask %#x", mask);
    gather("match.any.sync", &value, [](Warp&, void* const* values) {
        u32 found[LANES] = {};
        for (unsigned lane = 0; lane < LANES; ++lane)
            for (unsigned other = 0; other < LANES; ++other)
                found[lane] |= u32(*static_cast<u32*>(values[lane]) == *static_cast<u32*>(values[other])) << other;
        for (unsigned lane = 0; lane < LANES; ++lane) *static_cast<u32*>(values[lane]) = found[lane];
    });
    result.set(value);
}

// Always the same lane, as the specification wants, which does not say which.
void emulation::elect(bool& chosen, u32 mask) {
    if (mask != 0xffffffffu) fail("elect.sync of some lanes only, mask %#x", mask);
    gather("elect.sync", &chosen, [](Warp&, void* const* lanes) {
        for (unsigned lane = 0; lane < LANES; ++lane) *static_cast<bool*>(lanes[lane]) = lane == 13;
    });
}

unsigned __shfl_sync(unsigned mask, unsigned value, int lane) {
    using namespace emulation;
    if (mask != 0xffffffffu) fail("__shfl_sync of some lanes only, mask %#x", mask);
    struct Operands {
        unsigned value;
        unsigned from;
    } mine = {value, static_cast<unsigned>(lane) % LANES};
    gather("__shfl_sync", &mine, [](Warp&, void* const* operands) {
        unsigned values[LANES];
        for (unsigned l = 0; l < LANES; ++l) values[l] = static_cast<Operands*>(operands[l])->value;
        for (unsigned l = 0; l < LANES; ++l) {
            auto& its = *static_cast<Operands*>(operands[l]);
            its.value = values[its.from];
        }
    });
    return mine.value;
}

int __any_sync(unsigned mask, int predicate) {
    using namespace emulation;
    if (mask != 0xffffffffu) fail("__any_sync of some lanes only, mask %#x", mask);
    gather("__any_sync", &predicate, [](Warp&, void* const* predicates) {
        int any = 0;
        for (unsigned lane = 0; lane < LANES; ++lane) any |= *static_cast<int*>(predicates[lane]) != 0;
        for (unsigned lane = 0; lane < LANES; ++lane) *static_cast<int*>(predicates[lane]) = any;
    });
    return predicate;
}
