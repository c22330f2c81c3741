// Fibers, whose turn it is, deadlocks, failures and launches.
#include <execinfo.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "machine.h"
#include "memory.h"

namespace emulation {

Machine machine;
Fiber* self;

namespace {

jmp_buf scheduler_context, failure_context;
void (*kernel_entry)(void**);
void** kernel_arguments;

std::string place() {
    if (!self) return {};
    return format("block %u, warp %u, lane %u: ", self->block->index, self->warp->index, self->lane);
}

// A thread's stack and the stamps of its words. Pages are only used once touched.
struct StackPool {
    std::vector<char*> stacks;
    ~StackPool() {
        for (char* stack : stacks) munmap(stack, 2 * STACK_BYTES);
    }
    char* get(size_t index) {
        while (index >= stacks.size()) {
            void* memory = mmap(nullptr, 2 * STACK_BYTES, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (memory == MAP_FAILED) fail("the emulation has no memory for stacks");
            stacks.push_back(static_cast<char*>(memory));
        }
        return stacks[index];
    }
};

void fiber_main() {
    kernel_entry(kernel_arguments);
    check_copies_at_exit(*self);
    check_products_at_exit(*self);
    self->finished = true;
    --self->block->running;
    _longjmp(scheduler_context, 1);
}

// Switching by _setjmp saves the system call that swapcontext makes for the signal mask.
__attribute__((noinline)) void resume(Fiber* fiber) {
    self = fiber;
    if (!_setjmp(scheduler_context)) {
        if (fiber->started) _longjmp(fiber->context, 1);
        fiber->started = true;
        ucontext_t start;
        getcontext(&start);
        start.uc_stack.ss_sp = fiber->stack;
        start.uc_stack.ss_size = STACK_BYTES;
        start.uc_link = nullptr;
        makecontext(&start, fiber_main, 0);
        setcontext(&start);
    }
    self = nullptr;
}

void make_runnable(Fiber* fiber) {
    if (fiber->warp->runnable.empty()) machine.runnable.push_back(fiber->warp);
    fiber->warp->runnable.push_back(fiber);
}

// Even: every warp has the same chance at every turn. Skewed: the warp of the highest priority runs as long as it can,
// and priorities change at a few random points; that drives warps apart as far as the kernel's synchronisation allows
// (Burckhardt et al., "A randomized scheduler with probabilistic guarantees of finding bugs", ASPLOS 2010).
Warp* choose_warp() {
    if (!machine.skewed) return machine.runnable[machine.random.below(machine.runnable.size())];
    if (machine.random.one_in(512))
        machine.runnable[machine.random.below(machine.runnable.size())]->priority = machine.random.next();
    if (machine.random.one_in(512)) machine.engine_priority = machine.random.next();
    return *std::max_element(machine.runnable.begin(), machine.runnable.end(),
                             [](Warp* a, Warp* b) { return a->priority < b->priority; });
}

bool engine_goes_first(const Warp* chosen) {
    if (machine.copies.empty()) return false;
    if (machine.skewed) return machine.engine_priority > chosen->priority;
    return machine.random.one_in(16);
}

void end_previous_kernel() {
    machine.previous_ended = true;
    wake_all(machine.previous_waiters);
}

// Who waits where, threads with the same reason together.
std::string deadlock_report() {
    std::map<std::string, std::vector<const Fiber*>> waiting;
    size_t ended = 0;
    for (const auto& block : machine.blocks)
        for (const auto& fiber : block->fibers) {
            if (fiber->finished)
                ++ended;
            else
                waiting[fiber->reason(fiber->waits_for)].push_back(fiber.get());
        }
    std::string report = format("deadlock: nothing can run, %zu threads have ended;", ended);
    for (const auto& [reason, fibers] : waiting) {
        report += format(" %zu threads wait for %s:", fibers.size(), reason.c_str());
        std::string last;
        for (const Fiber* fiber : fibers) {
            const std::string warp = format(" block %u warp %u;", fiber->block->index, fiber->warp->index);
            if (warp != last) report += warp;
            last = warp;
        }
    }
    return report;
}

// Checks and forgets the cluster of a block that has ended, if it has ended too.
void retire(const Block& ended) {
    const unsigned cluster = ended.index / machine.cluster;
    for (const auto& block : machine.blocks)
        if (block->index / machine.cluster == cluster && block->running) return;
    for (const BulkCopy& copy : machine.copies)
        if (copy.block->index / machine.cluster == cluster) fail("the cluster ended with a bulk copy in flight");
    for (const auto& block : machine.blocks) {
        if (block->index / machine.cluster != cluster) continue;
        check_warpgroups(*block);
        check_barriers_at_end(*block);
    }
    auto& blocks = machine.blocks;
    const auto of_cluster = [&](const auto& block) { return block->index / machine.cluster == cluster; };
    blocks.erase(std::remove_if(blocks.begin(), blocks.end(), of_cluster), blocks.end());
}

// Until a cluster has ended.
void run_clusters() {
    const size_t blocks = machine.blocks.size();
    while (machine.blocks.size() == blocks) {
        if (machine.runnable.empty()) {
            if (!machine.copies.empty())
                land_one_copy();
            else if (!machine.previous_ended)
                end_previous_kernel();
            else
                fail("%s", deadlock_report().c_str());
            continue;
        }
        if (!machine.previous_ended && machine.random.one_in(256)) end_previous_kernel();
        Warp* warp = choose_warp();
        if (engine_goes_first(warp)) {
            land_one_copy();
            continue;
        }
        auto& fibers = warp->runnable;
        std::swap(fibers[machine.random.below(fibers.size())], fibers.back());
        Fiber* fiber = fibers.back();
        fibers.pop_back();
        if (fibers.empty()) machine.runnable.erase(std::find(machine.runnable.begin(), machine.runnable.end(), warp));
        resume(fiber);
        if (fiber->finished && !fiber->block->running) retire(*fiber->block);
    }
}

// The first place that no block has.
unsigned free_place() {
    unsigned place = 0;
    const auto taken = [&](const auto& block) { return block->place == place; };
    while (std::any_of(machine.blocks.begin(), machine.blocks.end(), taken)) ++place;
    return place;
}

void make_cluster(unsigned first_block, StackPool& stacks) {
    machine.cluster_arrived = machine.cluster_generation = 0;
    machine.engine_priority = machine.random.next();
    for (unsigned rank = 0; rank < machine.cluster; ++rank) {
        const unsigned place = free_place();
        machine.blocks.push_back(std::make_unique<Block>());
        Block& block = *machine.blocks.back();
        block.place = place;
        block.index = first_block + rank;
        block.rank = rank;
        block.running = machine.threads;
        block.warps.resize(machine.threads / LANES);
        block.gathered_for_cluster.counts.resize(Agents::number());
        block.released_by_cluster.push_back(block.gathered_for_cluster);
        for (NumberedBarrier& barrier : block.numbered) {
            barrier.gathered.counts.resize(Agents::number());
            barrier.released.counts.resize(Agents::number());
        }
        make_shared_memory(block);
        for (unsigned index = 0; index < block.warps.size(); ++index) {
            block.warps[index].block = &block;
            block.warps[index].index = index;
            block.warps[index].priority = machine.random.next();
        }
        for (unsigned thread = 0; thread < machine.threads; ++thread) {
            block.fibers.push_back(std::make_unique<Fiber>());
            Fiber& fiber = *block.fibers.back();
            fiber.block = &block;
            fiber.warp = &block.warps[thread / LANES];
            fiber.thread = thread;
            fiber.lane = thread % LANES;
            fiber.registers = machine.launch.registers;
            fiber.stack = stacks.get(place * machine.threads + thread);
            fiber.stamps = reinterpret_cast<uint32_t*>(fiber.stack + STACK_BYTES);
            fiber.clock.counts.resize(Agents::number());
            fiber.clock.counts[thread] = 1;
            make_runnable(&fiber);
        }
    }
}

// A failure jumps out of here; the few bytes that the frames between own are lost.
void run_grid(StackPool& stacks) {
    const Launch& launch = machine.launch;
    if (launch.threads % LANES || launch.threads > 1024) fail("blocks of %u threads", launch.threads);
    if (launch.grid % machine.cluster)
        fail("%u blocks are no whole clusters of %u", launch.grid, machine.cluster);
    std::vector<unsigned> order(launch.grid / machine.cluster);
    for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
    if (launch.resident > 1 && machine.cluster > 1) fail("the emulation runs clusters one at a time");
    // Blocks that wait for others do so for those that a GPU starts no later.
    if (machine.flags.empty())
        for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[machine.random.below(i)]);
    for (unsigned cluster : order) {
        if (machine.blocks.size() == launch.resident * machine.cluster) run_clusters();
        make_cluster(cluster * machine.cluster, stacks);
    }
    while (!machine.blocks.empty()) run_clusters();
}

}  // namespace

std::string format(const char* format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return text;
}

void fail(const char* format, ...) {
    const Launch& launch = machine.launch;
    const std::string prefix = place();
    memcpy(launch.message, prefix.data(), std::min<size_t>(prefix.size(), launch.message_bytes));
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(launch.message + prefix.size(), launch.message_bytes - prefix.size(), format, arguments);
    va_end(arguments);
    void* frames[MAX_FRAMES];
    const int found = self ? backtrace(frames, MAX_FRAMES) : 0;
    for (int i = 0; i < MAX_FRAMES; ++i) launch.frames[i] = i < found ? offset_in_library(frames[i]) : 0;
    self = nullptr;
    _longjmp(failure_context, 1);
}

__attribute__((noinline)) void suspend() {
    if (!_setjmp(self->context)) _longjmp(scheduler_context, 1);
}

void wake_all(Waiters& waiters) {
    for (Fiber* fiber : waiters) make_runnable(fiber);
    waiters.clear();
}

void maybe_yield(unsigned n) {
    if (!machine.random.one_in(n)) return;
    make_runnable(self);
    suspend();
}

Moment now() { return {self->thread, self->clock.counts[self->thread]}; }

void release() { ++self->clock.counts[self->thread]; }

void gather(const char* instruction, void* operands, void (*act)(Warp& warp, void* const* operands)) {
    Warp& warp = *self->warp;
    // Mostly these are the same words in the same place.
    if (warp.arrived && warp.gathering != instruction && strcmp(warp.gathering, instruction) != 0)
        fail("executes %s while other lanes of its warp execute %s", instruction, warp.gathering);
    warp.gathering = instruction;
    warp.operands[self->lane] = operands;
    const unsigned generation = warp.generation;
    if (++warp.arrived == LANES) {
        act(warp, warp.operands.data());
        warp.arrived = 0;
        ++warp.generation;
        wake_all(warp.waiters);
        return;
    }
    wait_until(
        warp.waiters, [&] { return warp.generation != generation; },
        [&] { return format("the other lanes at %s, where %u of 32 are", warp.gathering, warp.arrived); });
}

bool launch(const Launch& parameters, Image image, void (*kernel)(void**), void** arguments) {
    StackPool stacks;
    machine = Machine();
    machine.launch = parameters;
    machine.image = image;
    machine.threads = parameters.threads;
    machine.cluster = parameters.cluster;
    machine.random.state = parameters.seed * 0x9e3779b97f4a7c15ull + 0x1234567u;
    for (int i = 0; i < 8; ++i) machine.random.next();
    machine.skewed = machine.random.one_in(2);
    machine.copy_eagerness = machine.random.below(5);
    machine.previous_ended = !parameters.dependent;
    // Where dynamic memory starts depends on the static variables; kernels that need more than 128 bytes of alignment
    // have to see to it themselves.
    machine.static_bytes = parameters.dynamic_bytes ? STATIC_SHARED_BYTES : STATIC_ALONE_BYTES;
    machine.dynamic_at = SYSTEM_SHARED_BYTES + machine.static_bytes + 128 * machine.random.below(8);
    kernel_entry = kernel;
    kernel_arguments = arguments;
    const bool failed = _setjmp(failure_context);
    if (!failed) {
        open_memory();
        make_flags();
        run_grid(stacks);
    }
    machine = Machine();
    close_memory();
    return !failed;
}

unsigned thread_index() { return self->thread; }
unsigned block_index() { return self->block->index; }
unsigned block_size() { return machine.threads; }
unsigned grid_size() { return machine.launch.grid; }

}  // namespace emulation
