// Checked memory: a block's shared memory, the kernel's operands in global memory, and every plain access to either.
#pragma once
#include "machine.h"

namespace emulation {

constexpr size_t STACK_BYTES = 256 << 10;
// Shared memory of compute capability 9.0 starts with 1 KiB that belongs to the system.
// What a kernel may have of static shared memory, beside dynamic memory and without any.
constexpr uint32_t SYSTEM_SHARED_BYTES = 1024, STATIC_SHARED_BYTES = 2048, STATIC_ALONE_BYTES = 48 << 10;

void open_memory();
void close_memory();
void make_shared_memory(Block& block);
uint64_t offset_in_library(const void* address);

// Accesses of the running thread to its block's shared memory, by an agent that may be the thread itself or something
// that works for it. They return where the bytes are.
const unsigned char* read_shared(uint32_t address, uint32_t bytes, const char* what, Moment reader);
unsigned char* write_shared(uint32_t address, uint32_t bytes, const char* what, Moment writer);
// Whether the bytes may be read, without reading them: an asynchronous read is checked when it is requested too.
void check_readable(uint32_t address, uint32_t bytes, const char* what);
// An asynchronous copy claims its destination when it is requested; nobody may touch it until it has landed.
void claim_shared(uint32_t address, uint32_t bytes, const char* what, Moment writer);
void claim_for_bulk_copy(uint32_t address, uint32_t bytes, const char* what, Moment writer);
// Bulk copies and wgmma reach shared memory by another way (PTX ISA, "Async proxy"), which sees a thread's own stores
// only behind a fence. No kernel has one yet, so the emulation doesn't know it either.
void check_async_proxy(uint32_t address, uint32_t bytes, const char* what);
// The same in any block of the cluster, whose memory its last barrier has to have shown us.
Block& block_of_cluster_address(uint32_t address, const char* what);
uint32_t local_address(uint32_t address);
void claim_in_cluster(Block& block, uint32_t address, uint32_t bytes, const char* what, Moment writer);
unsigned char* land_in_shared(Block& block, uint32_t address, uint32_t bytes);
// A barrier object's bytes are for barrier instructions alone.
void make_barrier_bytes(uint32_t address);

enum class Access { READ, READ_CONSTANT, WRITE, FLAG, MESSAGE };
// Whether the running thread may touch global memory now.
// Whose bytes these are; null for nobody's.
const Range* range_of(uintptr_t address);
void check_global(uintptr_t address, size_t bytes, Access access, const char* what);

}  // namespace emulation
