// Who may touch which bytes, and the loads that are plain ones.
#include "memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstring>

namespace emulation {

namespace {

// The blocks of a cluster have their shared memory in windows of one reservation, so that an address says whose it is.
constexpr size_t WINDOW_BYTES = 512 << 10, WINDOWS = 64;
constexpr unsigned RANK_SHIFT = 24;  // of a shared::cluster address: the block's rank, plus one
unsigned char* windows = nullptr;

// What uninitialised and in-flight memory holds: NaN in every float format, and an index far out of bounds.
constexpr int POISON = 0xff;

void check_bounds(const Block& block, uint32_t address, uint32_t bytes, const char* what) {
    const bool fixed = address >= SYSTEM_SHARED_BYTES && address + bytes <= machine.static_end;
    const bool dynamic = address >= block.dynamic_at && address + bytes <= block.shared_end;
    if (!fixed && !dynamic)
        fail("%s out of bounds of shared memory: %u bytes at %u, dynamic memory is [%u, %u)", what, bytes, address,
             block.dynamic_at, block.shared_end);
}

const char* state_name(Granule::State state) {
    if (state == Granule::IN_FLIGHT) return "shared memory that an asynchronous copy has not reached yet";
    return "the bytes of an mbarrier";
}

// Where in the dynamic part an address is, which is how the kernels count.
std::string where(const Block& block, uint32_t address) {
    if (address < block.dynamic_at) return format("static + %u", address - SYSTEM_SHARED_BYTES);
    return format("dynamic + %u", address - block.dynamic_at);
}

// Memory that nobody has written may be read, as kernels do whose products ignore some rows; it is poisoned, so that
// whoever does use it gets a wrong result.
void check_read(const Granule& granule, const Clock& clock, uint32_t address, const char* what) {
    if (granule.state == Granule::IN_FLIGHT || granule.state == Granule::BARRIER)
        fail("%s reads %s, %s", what, state_name(granule.state), where(*self->block, address).c_str());
    if (!granule.write.before(clock))
        fail("%s reads what %s writes without waiting for it, %s", what, Agents::name(granule.write).c_str(),
             where(*self->block, address).c_str());
}

// A read that is ordered before this one may be forgotten: whoever waits for this one has waited for it.
void note_read(Granule& granule, const Clock& clock, Moment reader) {
    for (Moment& read : granule.reads)
        if (read.agent == reader.agent || read.before(clock)) {
            read = reader;
            return;
        }
    granule.reads[machine.random.below(Granule::READS)] = reader;
}

void check_write(const Granule& granule, const Clock& clock, uint32_t address, const char* what) {
    if (granule.state == Granule::IN_FLIGHT || granule.state == Granule::BARRIER)
        fail("%s writes %s, %s", what, state_name(granule.state), where(*self->block, address).c_str());
    if (!granule.write.before(clock))
        fail("%s overwrites what %s writes without waiting for it, %s", what, Agents::name(granule.write).c_str(),
             where(*self->block, address).c_str());
    for (const Moment& read : granule.reads)
        if (!read.before(clock))
            fail("%s overwrites what %s may still be reading, %s", what, Agents::name(read).c_str(),
                 where(*self->block, address).c_str());
}

template <typename ACT>
void each_granule(Block& block, uint32_t address, uint32_t bytes, ACT act) {
    for (uint32_t at = address & ~1u; at < address + bytes; at += 2) act(block.granules[at / 2], at);
}

}  // namespace

const Range* range_of(uintptr_t address) {
    for (uint32_t i = 0; i < machine.launch.range_count; ++i) {
        const Range& range = machine.launch.ranges[i];
        const uintptr_t begin = reinterpret_cast<uintptr_t>(range.begin);
        if (address >= begin && address < begin + range.bytes) return &range;
    }
    return nullptr;
}

namespace {

std::string nearest_range(uintptr_t address) {
    std::string nearest = "no operand is near";
    uintptr_t distance = 1 << 16;
    for (uint32_t i = 0; i < machine.launch.range_count; ++i) {
        const Range& range = machine.launch.ranges[i];
        const uintptr_t begin = reinterpret_cast<uintptr_t>(range.begin), end = begin + range.bytes;
        const uintptr_t away = address < begin ? begin - address : address - end;
        if (away >= distance) continue;
        distance = away;
        nearest = format("%zu bytes %s %s", static_cast<size_t>(away), address < begin ? "before" : "past the end of",
                         range.name);
    }
    return nearest;
}

// A plain access of the kernel, before it is made, to other memory than its thread's stack.
void check_plain_access(const void* pointer, uint32_t bytes, bool write) {
    const auto* byte = static_cast<const unsigned char*>(pointer);
    const size_t in_windows = static_cast<size_t>(byte - windows);
    if (in_windows < WINDOW_BYTES * WINDOWS) {
        if (in_windows / WINDOW_BYTES != self->block->place)
            fail("a plain access to the shared memory of another block");
        maybe_yield(32);
        const uint32_t address = in_windows % WINDOW_BYTES;
        if (write)
            write_shared(address, bytes, "a store", now());
        else
            read_shared(address, bytes, "a load", now());
        return;
    }
    // Constants of the kernel lie in its library.
    if (!write && pointer >= machine.image.begin && pointer < machine.image.end) return;
    check_global(reinterpret_cast<uintptr_t>(pointer), bytes, write ? Access::WRITE : Access::READ,
                 write ? "a store" : "a load");
}

// Every plain access comes through here, most of them to the stack: inlined into each hook. `alignment` is that of the
// accessed type, a power of two; 1 where the type says nothing.
inline __attribute__((always_inline)) void plain_access(const void* pointer, uint32_t bytes, bool write,
                                                        uint32_t alignment = 1) {
    Fiber* const fiber = self;
    if (!fiber) return;  // the library's own entry
    const size_t on_stack = static_cast<size_t>(static_cast<const char*>(pointer) - fiber->stack);
    if (on_stack < STACK_BYTES) {
        // As long as there was no fence, all stamps are zero, as in a fresh stack.
        if (write && machine.fences)
            for (size_t word = on_stack / 4; word < (on_stack + bytes + 3) / 4; ++word)
                fiber->stamps[word] = machine.fences;
        return;
    }
    if (reinterpret_cast<uintptr_t>(pointer) % alignment)
        fail("an access to %p, which is not aligned for its type", pointer);
    check_plain_access(pointer, bytes, write);
}

}  // namespace

void open_memory() {
    void* memory = mmap(nullptr, WINDOW_BYTES * WINDOWS, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("the emulation has no memory for shared memory");
    windows = static_cast<unsigned char*>(memory);
}

void close_memory() {
    if (windows) munmap(windows, WINDOW_BYTES * WINDOWS);
    windows = nullptr;
}

void make_shared_memory(Block& block) {
    block.dynamic_at = machine.dynamic_at;
    block.shared_end = block.dynamic_at + machine.launch.dynamic_bytes;
    if (block.place >= WINDOWS || block.shared_end > WINDOW_BYTES)
        fail("%u blocks at once with %u bytes of dynamic shared memory", machine.cluster * machine.launch.resident,
             machine.launch.dynamic_bytes);
    block.shared = windows + block.place * WINDOW_BYTES;
    memset(block.shared, POISON, block.shared_end);
    block.granules.assign((block.shared_end + 1) / 2, Granule());
}

uint64_t offset_in_library(const void* address) {
    const auto* byte = static_cast<const char*>(address);
    const Image& image = machine.image;
    return byte >= image.begin && byte < image.end ? static_cast<uint64_t>(byte - image.begin) : 0;
}

const unsigned char* read_shared(uint32_t address, uint32_t bytes, const char* what, Moment reader) {
    Block& block = *self->block;
    check_bounds(block, address, bytes, what);
    each_granule(block, address, bytes, [&](Granule& granule, uint32_t at) {
        check_read(granule, self->clock, at, what);
        note_read(granule, self->clock, reader);
    });
    return block.shared + address;
}

unsigned char* write_shared(uint32_t address, uint32_t bytes, const char* what, Moment writer) {
    Block& block = *self->block;
    check_bounds(block, address, bytes, what);
    each_granule(block, address, bytes, [&](Granule& granule, uint32_t at) {
        check_write(granule, self->clock, at, what);
        granule.write = writer;
        granule.reads.fill(Moment());
        granule.state = Granule::WRITTEN;
        granule.by_thread = true;
    });
    return block.shared + address;
}

void check_readable(uint32_t address, uint32_t bytes, const char* what) {
    Block& block = *self->block;
    check_bounds(block, address, bytes, what);
    each_granule(block, address, bytes,
                 [&](const Granule& granule, uint32_t at) { check_read(granule, self->clock, at, what); });
}

void check_async_proxy(uint32_t address, uint32_t bytes, const char* what) {
    each_granule(*self->block, address, bytes, [&](const Granule& granule, uint32_t at) {
        if (granule.by_thread)
            fail("%s after a thread's own store to the same bytes, which takes a fence.proxy.async, %s", what,
                 where(*self->block, at).c_str());
    });
}

void claim_shared(uint32_t address, uint32_t bytes, const char* what, Moment writer) {
    memset(write_shared(address, bytes, what, writer), POISON, bytes);
    each_granule(*self->block, address, bytes, [](Granule& granule, uint32_t) { granule.state = Granule::IN_FLIGHT; });
}

uint32_t local_address(uint32_t address) { return address & ((1u << RANK_SHIFT) - 1); }

Block& block_of_cluster_address(uint32_t address, const char* what) {
    const u32 rank = (address >> RANK_SHIFT) == 0 ? self->block->rank : (address >> RANK_SHIFT) - 1;
    Block& block = machine.cluster == 1 ? *self->block : *machine.blocks[rank];
    if (!block.running) fail("%s to block %u, which has ended", what, block.index);
    return block;
}

void claim_in_cluster(Block& block, uint32_t address, uint32_t bytes, const char* what, Moment writer) {
    const Clock& clock =
        &block == self->block ? self->clock : block.released_by_cluster[self->clock.counts[Agents::other_blocks()]];
    check_bounds(block, address, bytes, what);
    memset(block.shared + address, POISON, bytes);
    each_granule(block, address, bytes, [&](Granule& granule, uint32_t at) {
        check_write(granule, clock, at, what);
        granule.write = writer;
        granule.reads.fill(Moment());
        granule.state = Granule::IN_FLIGHT;
        granule.by_thread = true;
    });
}

unsigned char* land_in_shared(Block& block, uint32_t address, uint32_t bytes) {
    each_granule(block, address, bytes, [](Granule& granule, uint32_t) { granule.state = Granule::WRITTEN; });
    return block.shared + address;
}

void claim_for_bulk_copy(uint32_t address, uint32_t bytes, const char* what, Moment writer) {
    check_bounds(*self->block, address, bytes, what);
    check_async_proxy(address, bytes, what);
    claim_shared(address, bytes, what, writer);
    each_granule(*self->block, address, bytes, [](Granule& granule, uint32_t) { granule.by_thread = false; });
}

void make_barrier_bytes(uint32_t address) {
    write_shared(address, 8, "mbarrier.init", now());
    each_granule(*self->block, address, 8, [](Granule& granule, uint32_t) { granule.state = Granule::BARRIER; });
}

void check_global(uintptr_t address, size_t bytes, Access access, const char* what) {
    const Range* range = range_of(address);
    if (!range || address + bytes > reinterpret_cast<uintptr_t>(range->begin) + range->bytes)
        fail("%s of %zu bytes out of bounds of global memory: %s", what, bytes,
             nearest_range(range ? address + bytes : address).c_str());
    if ((range->flags == Range::FLAGS) != (access == Access::FLAG))
        fail("%s of %s, %s", what, range->name, range->flags ? "which is for flags" : "which is no flag");
    if ((range->flags == Range::MESSAGES) != (access == Access::MESSAGE))
        fail("%s of %s, %s", what, range->name, range->flags ? "which is for messages" : "which is no message");
    if (access == Access::WRITE && !range->writable) fail("%s writes %s, which is an input", what, range->name);
    if (access == Access::READ_CONSTANT && range->writable)
        fail("%s reads %s through the read-only path while the kernel may write it", what, range->name);
    if (range->writable && range->flags == Range::PLAIN) {
        auto& writes = machine.writes[range - machine.launch.ranges];
        writes.resize((range->bytes + 1) / 2);
        const size_t first = address - reinterpret_cast<uintptr_t>(range->begin);
        for (size_t byte = first & ~size_t{1}; byte < first + bytes; byte += 2) {
            GlobalWrite& write = writes[byte / 2];
            if (access == Access::WRITE) {
                if (write.written) fail("%s writes byte %zu of %s a second time", what, byte, range->name);
                write = {true, self->block->index, now()};
            } else if (!write.written) {
                if (range->holds_values) continue;
                fail("%s reads byte %zu of %s, which nobody has written", what, byte, range->name);
            } else if (!known(write.block, write.moment)) {
                fail("%s reads byte %zu of %s, which %s of block %u writes, without waiting for it", what, byte,
                     range->name, Agents::name(write.moment).c_str(), write.block);
            }
        }
    }
    if (range->after_previous && machine.launch.dependent && !self->clock.counts[Agents::previous_kernel()])
        fail("%s touches %s without waiting for the previous kernel (griddepcontrol.wait)", what, range->name);
}

std::string Agents::name(Moment moment) {
    const unsigned agent = moment.agent;
    if (agent < machine.threads) return format("thread %u (warp %u)", agent, agent / LANES);
    if (agent < 2 * machine.threads)
        return format("cp.async group %u of thread %u", moment.count - 1, agent - machine.threads);
    if (agent < barrier(0)) return format("a wgmma of warp %u", agent - 2 * machine.threads);
    if (agent < other_blocks())
        return format("a bulk copy of mbarrier %u (in the order of initialisation), phase %u", agent - barrier(0),
                      moment.count - 1);
    return agent == other_blocks() ? "another block of the cluster" : "another block";
}

// Static variables get their places in the order in which any thread first comes to them.
void* static_shared(unsigned variable, size_t bytes, size_t alignment) {
    const auto [found, added] = machine.static_variables.try_emplace(variable, 0);
    if (added) {
        const uint32_t end = machine.static_end ? machine.static_end : SYSTEM_SHARED_BYTES;
        found->second = static_cast<uint32_t>((end + alignment - 1) / alignment * alignment);
        machine.static_end = static_cast<uint32_t>(found->second + bytes);
        if (machine.static_end > SYSTEM_SHARED_BYTES + machine.static_bytes)
            fail("the emulation keeps %u bytes for static shared memory", machine.static_bytes);
        const uint32_t used = machine.static_end - SYSTEM_SHARED_BYTES + machine.launch.dynamic_bytes;
        if (used > machine.launch.shared_limit)
            fail("static and dynamic shared memory take %u bytes, a block may have %u", used,
                 machine.launch.shared_limit);
    }
    return self->block->shared + found->second;
}

void* dynamic_shared() { return self->block->shared + self->block->dynamic_at; }

// Data movement (PTX ISA, "Data Movement and Conversion Instructions"): ld, mapa.

void load_constant_v4(const Outputs4& values, u64 address) {
    if (address % 16) fail("ld.global.nc.v4 from an address that is no multiple of 16");
    check_global(address, 16, Access::READ_CONSTANT, "ld.global.nc");
    u32 loaded[4];
    memcpy(loaded, reinterpret_cast<const void*>(address), 16);
    for (int i = 0; i < 4; ++i) values[i].set(loaded[i]);
}

void load_constant_u16(Output<u16> value, u64 address) {
    if (address % 2) fail("ld.global.nc.u16 from an odd address");
    check_global(address, 2, Access::READ_CONSTANT, "ld.global.nc");
    u16 loaded;
    memcpy(&loaded, reinterpret_cast<const void*>(address), 2);
    value.set(loaded);
}

template <size_t WORDS>
void store_global(u64 address, const Array<Input<u32>, WORDS>& values) {
    if (address % (4 * WORDS)) fail("st.global.v%zu to an address that is no multiple of %zu", WORDS, 4 * WORDS);
    check_global(address, 4 * WORDS, Access::WRITE, "st.global");
    for (size_t i = 0; i < WORDS; ++i) memcpy(reinterpret_cast<void*>(address + 4 * i), &values[i].value, 4);
}
template void store_global<2>(u64, const Array<Input<u32>, 2>&);
template void store_global<4>(u64, const Array<Input<u32>, 4>&);

void load_l2_v4(const Outputs4& values, u64 address) {
    if (address % 16) fail("ld.global.cg.v4 from an address that is no multiple of 16");
    check_global(address, 16, Access::READ, "ld.global.cg");
    u32 loaded[4];
    memcpy(loaded, reinterpret_cast<const void*>(address), 16);
    for (int i = 0; i < 4; ++i) values[i].set(loaded[i]);
}

void load_l2_word(Output<u32> value, u64 address) {
    if (address % 4) fail("ld.global.cg.u32 from an address that is no multiple of 4");
    check_global(address, 4, Access::READ, "ld.global.cg");
    u32 loaded;
    memcpy(&loaded, reinterpret_cast<const void*>(address), 4);
    value.set(loaded);
}

void load_shared_v4(const Outputs4& values, u32 address) {
    if (address % 16) fail("ld.shared.v4 from an address that is no multiple of 16");
    maybe_yield(32);
    u32 loaded[4];
    memcpy(loaded, read_shared(address, 16, "ld.shared", now()), 16);
    for (int i = 0; i < 4; ++i) values[i].set(loaded[i]);
}

void store_shared_v4(u32 address, const Inputs4& values) {
    if (address % 16) fail("st.shared.v4 to an address that is no multiple of 16");
    maybe_yield(32);
    unsigned char* destination = write_shared(address, 16, "st.shared", now());
    for (int i = 0; i < 4; ++i) memcpy(destination + 4 * i, &values[i].value, 4);
}

void store_shared_word(u32 address, u32 value) {
    if (address % 4) fail("st.shared.u32 to an address that is no multiple of 4");
    maybe_yield(32);
    memcpy(write_shared(address, 4, "st.shared", now()), &value, 4);
}

void map_cluster_address(Output<u32> result, u32 address, u32 rank) {
    if (rank >= machine.cluster) fail("mapa to rank %u of a cluster of %u", rank, machine.cluster);
    result.set((address & ((1u << RANK_SHIFT) - 1)) | (rank + 1) << RANK_SHIFT);
}

// Blocks know of each other what the cluster's barrier told them: a read finds what its own thread's last wait covers,
// and counts in the other block as done when that barrier's next phase ends.
void load_cluster_v4(const Array<Output<float>, 4>& values, u32 address) {
    maybe_yield(32);
    const u32 local = local_address(address);
    if (local % 16) fail("ld.shared::cluster.v4 from an address that is no multiple of 16");
    Block& block = block_of_cluster_address(address, "ld.shared::cluster");
    check_bounds(block, local, 16, "ld.shared::cluster");
    const bool own = &block == self->block;
    const u32 waited = self->clock.counts[Agents::other_blocks()];
    const Clock& clock = own ? self->clock : block.released_by_cluster[waited];
    const Moment reader = own ? now() : Moment{Agents::other_blocks(), self->cluster_arrivals + 1};
    each_granule(block, local, 16, [&](Granule& granule, uint32_t at) {
        check_read(granule, clock, at, "ld.shared::cluster");
        note_read(granule, clock, reader);
    });
    float loaded[4];
    memcpy(loaded, block.shared + local, 16);
    for (int i = 0; i < 4; ++i) values[i].set(loaded[i]);
}

}  // namespace emulation

size_t __cvta_generic_to_shared(const void* pointer) {
    using namespace emulation;
    const auto offset = static_cast<size_t>(static_cast<const unsigned char*>(pointer) - self->block->shared);
    if (offset >= WINDOW_BYTES) fail("a pointer that is not into shared memory is taken for one");
    return offset;
}

float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}

// The hooks that the compiler puts before every access of the kernel (-fsanitize=thread) and where array bounds are
// violated (-fsanitize=bounds); the sanitizers' own libraries are not linked. A name without "unaligned" says that the
// accessed type is aligned to its size.
#define HOOKS(BYTES)                                                                                          \
    extern "C" void __tsan_read##BYTES(void* p) { emulation::plain_access(p, BYTES, false, BYTES); }          \
    extern "C" void __tsan_write##BYTES(void* p) { emulation::plain_access(p, BYTES, true, BYTES); }          \
    extern "C" void __tsan_unaligned_read##BYTES(void* p) { emulation::plain_access(p, BYTES, false); }       \
    extern "C" void __tsan_unaligned_write##BYTES(void* p) { emulation::plain_access(p, BYTES, true); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
extern "C" void __tsan_read_range(void* p, size_t bytes) { emulation::plain_access(p, bytes, false); }
extern "C" void __tsan_write_range(void* p, size_t bytes) { emulation::plain_access(p, bytes, true); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

namespace {
struct SourceLocation {
    const char* file;
    uint32_t line, column;
};
}  // namespace

extern "C" void __ubsan_handle_type_mismatch_v1(SourceLocation* at, void* pointer) {
    emulation::fail("%s:%u: an access to %p, which is not aligned for its type", at->file, at->line, pointer);
}

extern "C" void __ubsan_handle_out_of_bounds(SourceLocation* at, uintptr_t index) {
    emulation::fail("%s:%u: index %zd is out of an array's bounds", at->file, at->line, static_cast<ssize_t>(index));
}
