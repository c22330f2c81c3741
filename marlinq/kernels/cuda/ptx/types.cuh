// Short names of integer types, shared addresses, and hints to the compiler. None of the wrappers in ptx/ needs a CUDA header,
// so a kernel compiles wherever NVRTC itself is installed.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// The same value, hidden from the compiler: it then keeps nothing in registers that it could derive from a number, and reaches
// data at constant distances from an address by immediate offsets.
__device__ __forceinline__ int opaque(int number) {
    asm volatile("" : "+r"(number));
    return number;
}
__device__ __forceinline__ const float* opaque(const float* address) {
    asm volatile("" : "+l"(address));
    return address;
}

// A number that all lanes of the warp have: the compiler may keep the result in a uniform register.
__device__ __forceinline__ u32 uniform(u32 number) { return __shfl_sync(0xffffffffu, number, 0); }

// A number as a type, for lambdas that need a constant.
template <int VALUE>
struct Number {
    static constexpr int value = VALUE;
};
