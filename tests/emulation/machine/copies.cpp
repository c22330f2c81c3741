// Asynchronous copies to shared memory (PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy").
//
// What a copy will overwrite is claimed, and poisoned, at once; the bytes arrive later, in any order. So a reader that
// does not wait finds claimed memory, and a writer that does not wait for readers is found by the clocks.
#include <cstring>

#include "machine.h"
#include "memory.h"

namespace emulation {

namespace {

void land(const ThreadCopy& copy) {
    unsigned char* destination = land_in_shared(*self->block, copy.destination, 16);
    memset(destination, 0, 16);
    memcpy(destination, copy.source, copy.valid);
}

// What the host put into the 128 bytes of a tensor map, which are opaque to the kernel; mirrored in launching.py.
struct EmulatedTensorMap {
    const u16* begin;
    int64_t rows, columns, stride;  // in elements of 16 bits
    int64_t box_rows, box_columns;
};

// The 128-byte swizzle (PTX ISA, "Tensors: swizzling modes"): the number of a 16-byte piece in its 128-byte row is
// XOR-ed with the row's number modulo 8, both counted in the address itself.
u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

}  // namespace

// cp.async: per thread, in groups.

void copy_async(u32 destination, u64 source, u32 bytes, u32 valid) {
    if (bytes != 16 || valid > 16) fail("cp.async of %u bytes, %u of them valid", bytes, valid);
    if (destination % 16 || source % 16) fail("cp.async with an address that is no multiple of 16");
    if (valid) check_global(source, valid, Access::READ, "cp.async");
    CopyQueue& queue = self->copies;
    claim_shared(destination, 16, "cp.async",
                 {Agents::copies_of(*self), static_cast<u32>(queue.groups.size()) + 1});
    const ThreadCopy copy = {destination, valid, reinterpret_cast<const unsigned char*>(source)};
    if (machine.random.below(4) < machine.copy_eagerness)
        land(copy);
    else
        queue.open.push_back(copy);
}

void copy_async_commit() {
    self->copies.groups.push_back(std::move(self->copies.open));
    self->copies.open.clear();
    maybe_yield(8);
}

void copy_async_wait(u32 pending) {
    CopyQueue& queue = self->copies;
    for (; queue.completed_groups + pending < queue.groups.size(); ++queue.completed_groups) {
        for (const ThreadCopy& copy : queue.groups[queue.completed_groups]) land(copy);
        queue.groups[queue.completed_groups].clear();
    }
    self->clock.counts[Agents::copies_of(*self)] = queue.completed_groups;
    maybe_yield(8);
}

void check_copies_at_exit(const Fiber& fiber) {
    bool in_flight = !fiber.copies.open.empty();
    for (const auto& group : fiber.copies.groups) in_flight |= !group.empty();
    if (in_flight) fail("the thread ends with a cp.async in flight");
}

// cp.async.bulk and cp.async.bulk.tensor: complete on an mbarrier.

void copy_bulk(u32 destination, u64 source, u32 bytes, u32 barrier, u64) {
    if (destination % 16 || source % 16 || bytes % 16 || !bytes)
        fail("cp.async.bulk of %u bytes to %u; size and addresses must be multiples of 16", bytes,
             destination);
    check_global(source, bytes, Access::READ, "cp.async.bulk");
    claim_for_bulk_copy(destination, bytes, "cp.async.bulk", copy_moment(barrier));
    begin_copy(barrier, bytes, "cp.async.bulk");
    const auto* data = reinterpret_cast<const unsigned char*>(source);
    machine.copies.push_back({self->block, destination, bytes, barrier, {data, data + bytes}});
    maybe_yield(4);
}

// Moves nothing that a kernel could see, but the bytes have to exist.
void prefetch_bulk(u64 source, u32 bytes) {
    if (source % 16 || bytes % 16)
        fail("cp.async.bulk.prefetch of %u bytes; size and address must be multiples of 16", bytes);
    check_global(source, bytes, Access::READ, "cp.async.bulk.prefetch");
}

void copy_tensor_2d(u32 destination, u64 address, const std::array<Input<u32>, 2>& at,
                    u32 barrier) {
    EmulatedTensorMap map;
    memcpy(&map, reinterpret_cast<const void*>(address), sizeof map);
    const auto row_bytes = static_cast<u32>(map.box_columns * 2), bytes = static_cast<u32>(map.box_rows) * row_bytes;
    if (address % 64) fail("a tensor map at an address that is no multiple of 64");
    if (row_bytes != 128) fail("a box with rows of %u bytes; the swizzle is emulated for 128", row_bytes);
    if (destination % 128) fail("cp.async.bulk.tensor to %u, which is no multiple of 128", destination);
    const auto x = static_cast<int32_t>(at[0].value), y = static_cast<int32_t>(at[1].value);
    claim_for_bulk_copy(destination, bytes, "cp.async.bulk.tensor", copy_moment(barrier));
    begin_copy(barrier, bytes, "cp.async.bulk.tensor");
    // Elements outside the tensor are zero, and count as bytes.
    std::vector<unsigned char> data(bytes, 0);
    for (int64_t row = 0; row < map.box_rows; ++row)
        for (int64_t column = 0; column < map.box_columns; ++column) {
            const int64_t r = y + row, c = x + column;
            if (r < 0 || r >= map.rows || c < 0 || c >= map.columns) continue;
            const u16* element = map.begin + r * map.stride + c;
            check_global(reinterpret_cast<uintptr_t>(element), 2, Access::READ, "cp.async.bulk.tensor");
            const u32 place = swizzled(destination + static_cast<u32>(row) * row_bytes + static_cast<u32>(column) * 2);
            // A destination between two atoms of 1024 bytes would be permuted beyond its own rows.
            if (place - destination >= bytes) fail("a box at %u leaves its bytes when swizzled", destination);
            memcpy(&data[place - destination], element, 2);
        }
    machine.copies.push_back({self->block, destination, bytes, barrier, std::move(data)});
    maybe_yield(4);
}

void land_one_copy() {
    std::swap(machine.copies[machine.random.below(machine.copies.size())], machine.copies.back());
    const BulkCopy copy = std::move(machine.copies.back());
    machine.copies.pop_back();
    memcpy(land_in_shared(*copy.block, copy.destination, copy.bytes), copy.data.data(), copy.bytes);
    end_copy(*copy.block, copy.barrier, copy.bytes);
}

}  // namespace emulation
