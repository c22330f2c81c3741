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
    const unsigned char* begin;
    int64_t element_bytes, swizzled;
    int64_t extents[3], strides[3], box[3];  // the contiguous dimension first; strides in bytes
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

// cp.async.bulk.tensor: completes on an mbarrier.

namespace {

EmulatedTensorMap read_map(u64 address) {
    if (address % 64) fail("a tensor map at an address that is no multiple of 64");
    EmulatedTensorMap map;
    memcpy(&map, reinterpret_cast<const void*>(address), sizeof map);
    if (!map.begin) fail("a tensor map that the host has not made");
    return map;
}

void copy_tensor(u32 destination, u64 address, const int64_t (&at)[3], u32 barrier) {
    const EmulatedTensorMap map = read_map(address);
    const auto row_bytes = static_cast<u32>(map.box[0] * map.element_bytes);
    const auto bytes = static_cast<u32>(row_bytes * map.box[1] * map.box[2]);
    if (map.swizzled && row_bytes != 128)
        fail("a box with rows of %u bytes; the swizzle is emulated for 128", row_bytes);
    if (destination % 128) fail("cp.async.bulk.tensor to %u, which is no multiple of 128", destination);
    claim_for_bulk_copy(destination, bytes, "cp.async.bulk.tensor", copy_moment(barrier));
    begin_copy(barrier, bytes, "cp.async.bulk.tensor");
    // Elements outside the tensor are zero, and count as bytes.
    std::vector<unsigned char> data(bytes, 0);
    u32 place = 0;
    for (int64_t z = at[2]; z < at[2] + map.box[2]; ++z)
        for (int64_t y = at[1]; y < at[1] + map.box[1]; ++y, place += row_bytes) {
            if (z < 0 || z >= map.extents[2] || y < 0 || y >= map.extents[1]) continue;
            for (int64_t i = 0; i < map.box[0]; ++i) {
                const int64_t x = at[0] + i;
                if (x < 0 || x >= map.extents[0]) continue;
                const unsigned char* element =
                    map.begin + x * map.element_bytes + y * map.strides[1] + z * map.strides[2];
                const auto size = static_cast<size_t>(map.element_bytes);
                check_global(reinterpret_cast<uintptr_t>(element), size, Access::READ, "cp.async.bulk.tensor");
                u32 to = destination + place + static_cast<u32>(i * map.element_bytes);
                if (map.swizzled) to = swizzled(to);
                // A destination between two atoms of 1024 bytes would be permuted beyond its own rows.
                if (to - destination >= bytes) fail("a box at %u leaves its bytes when swizzled", destination);
                memcpy(&data[to - destination], element, size);
            }
        }
    machine.copies.push_back({self->block, destination, bytes, barrier, std::move(data)});
    maybe_yield(4);
}

}  // namespace

void copy_tensor_2d(u32 destination, u64 map, const Array<Input<u32>, 2>& at, u32 barrier) {
    const int64_t corner[3] = {static_cast<int32_t>(at[0].value), static_cast<int32_t>(at[1].value), 0};
    copy_tensor(destination, map, corner, barrier);
}

void copy_tensor_3d(u32 destination, u64 map, const Array<Input<u32>, 3>& at, u32 barrier, u64) {
    const int64_t corner[3] = {static_cast<int32_t>(at[0].value), static_cast<int32_t>(at[1].value),
                               static_cast<int32_t>(at[2].value)};
    copy_tensor(destination, map, corner, barrier);
}

// st.async: a store to any block of the cluster that completes on an mbarrier there.
void store_async_v4(u32 address, const Inputs4& values, u32 barrier) {
    if (address % 16) fail("st.async.v4 to an address that is no multiple of 16");
    Block& block = block_of_cluster_address(address, "st.async");
    if (&block != &block_of_cluster_address(barrier, "st.async"))
        fail("st.async to one block and the mbarrier of another");
    const u32 destination = local_address(address), counter = local_address(barrier);
    claim_in_cluster(block, destination, 16, "st.async", begin_store(block, counter, 16, "st.async"));
    std::vector<unsigned char> data(16);
    for (int i = 0; i < 4; ++i) memcpy(&data[4 * i], &values[i].value, 4);
    machine.copies.push_back({&block, destination, 16, counter, std::move(data)});
    maybe_yield(32);
}

void land_one_copy() {
    std::swap(machine.copies[machine.random.below(machine.copies.size())], machine.copies.back());
    const BulkCopy copy = std::move(machine.copies.back());
    machine.copies.pop_back();
    if (!copy.block->running) fail("%u bytes reach block %u, which has ended", copy.bytes, copy.block->index);
    memcpy(land_in_shared(*copy.block, copy.destination, copy.bytes), copy.data.data(), copy.bytes);
    end_copy(*copy.block, copy.barrier, copy.bytes);
}

}  // namespace emulation
