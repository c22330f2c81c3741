// Short names of integer types, and what the compiler is told of a value. These wrappers of PTX need no CUDA header, so a
// kernel compiles wherever NVRTC itself is installed.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The same number or address, of which the compiler knows nothing: so it keeps nothing in registers that follows from
// the number, and reaches what is at constant distances from the address by offsets.
__device__ __forceinline__ int opaque(int number) {
    asm volatile("" : "+r"(number));
    return number;
}
__device__ __forceinline__ const float* opaque(const float* address) {
    asm volatile("" : "+l"(address));
    return address;
}

// The same number, of which the compiler knows that all lanes have it: it stays in a uniform register.
__device__ __forceinline__ u32 uniform(u32 number) { return __shfl_sync(0xffffffffu, number, 0); }
