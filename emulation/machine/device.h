// What a kernel's source sees: CUDA's built-ins, and the PTX instructions that replace its asm statements.
//
// None of the standard library's headers but the two smallest: they take longer than the rest of a kernel's compilation.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

struct __align__(8) uint2 {
    unsigned x, y;
};
struct __align__(16) uint4 {
    unsigned x, y, z, w;
};
struct __align__(16) int4 {
    int x, y, z, w;
};
struct __align__(8) float2 {
    float x, y;
};
struct __align__(16) float4 {
    float x, y, z, w;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// CUDA's mixed-sign overloads follow the usual arithmetic conversions, as this does.
template <typename A, typename B>
constexpr auto min(A a, B b) -> decltype(a + b) {
    return static_cast<decltype(a + b)>(a) < static_cast<decltype(a + b)>(b) ? a : b;
}
template <typename A, typename B>
constexpr auto max(A a, B b) -> decltype(a + b) {
    return static_cast<decltype(a + b)>(a) < static_cast<decltype(a + b)>(b) ? b : a;
}

// What kernels call of the host's mathematics, declared as there. A new function is a line here.
extern "C" {
float erff(float) noexcept;
float exp2f(float) noexcept;
float expf(float) noexcept;
float fabsf(float) noexcept;
float fmaf(float, float, float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float log1pf(float) noexcept;
float log2f(float) noexcept;
float logf(float) noexcept;
float rintf(float) noexcept;
float sqrtf(float) noexcept;
float tanhf(float) noexcept;
}
#ifndef INFINITY
#define INFINITY (__builtin_inff ())
#endif

// The linker's names for where this library begins and ends.
extern "C" const char __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" const char _end[] __attribute__((visibility("hidden")));

namespace emulation {

unsigned thread_index();
unsigned block_index();
unsigned block_size();
unsigned grid_size();
template <unsigned (*GET)()>
struct BuiltIn {
    struct {
        operator unsigned() const { return GET(); }
    } x;
};

// A place for a __shared__ variable in the block's static shared memory.
void* static_shared(unsigned variable, size_t bytes, size_t alignment);
void* dynamic_shared();

}  // namespace emulation

static const emulation::BuiltIn<emulation::thread_index> threadIdx;
static const emulation::BuiltIn<emulation::block_index> blockIdx;
static const emulation::BuiltIn<emulation::block_size> blockDim;
static const emulation::BuiltIn<emulation::grid_size> gridDim;

size_t __cvta_generic_to_shared(const void* pointer);
float __uint_as_float(unsigned bits);
unsigned __float_as_uint(float value);
void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffffu);
unsigned __reduce_add_sync(unsigned mask, unsigned value);
unsigned __shfl_sync(unsigned mask, unsigned value, int lane);
int __any_sync(unsigned mask, int predicate);

namespace emulation {

// What kernels need of <array>, <type_traits> and <utility>.
template <typename T, size_t N>
struct Array {
    T items[N];
    T& operator[](size_t index) { return items[index]; }
    const T& operator[](size_t index) const { return items[index]; }
    const T* data() const { return items; }
};
template <typename T>
struct Type {
    typedef T Plain;  // without const and reference
    static constexpr bool POINTER = false, LVALUE = false;
};
template <typename T>
struct Type<const T> : Type<T> {};
template <typename T>
struct Type<T*> {
    typedef T* Plain;
    static constexpr bool POINTER = true, LVALUE = false;
};
template <typename T>
struct Type<T&> : Type<T> {
    static constexpr bool LVALUE = true;
};
template <typename T>
struct Type<T&&> : Type<T> {};
template <typename T>
constexpr bool FLOATING = __is_same(T, float) || __is_same(T, double);
template <size_t...>
struct Indices {};
template <size_t N, size_t... REST>
struct IndicesBelow : IndicesBelow<N - 1, N - 1, REST...> {};
template <size_t... ALL>
struct IndicesBelow<0, ALL...> {
    typedef Indices<ALL...> Made;
};

// Operands of an asm statement. An input remembers where its register lives, if it has a name, because asynchronous
// products read it later than their instruction.
template <typename T>
struct Output {
    T* home;
    Output(T& variable) : home(&variable) {}
    void set(T value) const { *home = value; }
};
template <typename T>
struct Input {
    T value;
    const T* home;
    operator T() const { return value; }
};

template <typename T, typename X>
Output<T> output(X& variable) {
    static_assert(sizeof(T) == sizeof(X), "the operand's constraint and its variable differ in size");
    return Output<T>(reinterpret_cast<T&>(variable));
}
template <typename T, typename X>
Input<T> input(X&& expression) {
    typedef typename Type<X>::Plain Plain;
    if constexpr (Type<X>::POINTER) {
        static_assert(sizeof(T) == sizeof(Plain), "pointers are 64-bit operands");
        return Input<T>{reinterpret_cast<T>(expression), nullptr};
    } else if constexpr (Type<X>::LVALUE && sizeof(T) == sizeof(Plain)) {
        return Input<T>{static_cast<T>(expression), reinterpret_cast<const T*>(&expression)};
    } else {
        static_assert(FLOATING<T> == FLOATING<Plain>, "asm does not convert");
        return Input<T>{static_cast<T>(expression), nullptr};
    }
}
template <typename X, typename... Rest>
Array<X, 1 + sizeof...(Rest)> group(X first, Rest... rest) {
    return {first, rest...};
}
// Two registers of a block, which an instruction reads or writes.
inline Array<Output<uint16_t>, 2> group(uint16_t& low, uint16_t& high) { return {low, high}; }
// `_`, the result that nobody wants.
struct Sink {};

// The parameters of a launch; mirrored in launching.py.
struct Range {
    const char* name;
    const unsigned char* begin;
    uint64_t bytes;
    uint32_t writable;        // else read-only
    uint32_t after_previous;  // not to be touched before the previous kernel has ended
    uint32_t holds_values;    // may be read before it is written
    uint32_t flags;           // a kind, below

    // FLAGS: words that order the blocks' accesses to the other ranges; no others are ordered. MESSAGES: words that say
    // themselves whether they have been written. UNTRACKED: has been written before, and reads are not ordered.
    enum Kind : uint32_t { PLAIN, FLAGS, MESSAGES, UNTRACKED };
};
constexpr int MAX_FRAMES = 16;
struct Launch {
    uint32_t grid, threads, dynamic_bytes, shared_limit, registers, dependent;
    uint64_t seed;
    const Range* ranges;
    uint32_t range_count, message_bytes;
    char* message;
    uint64_t* frames;  // where a failure arose: MAX_FRAMES offsets into the library, innermost first, padded with 0
    uint32_t cluster;
    uint32_t resident;  // clusters that may run at once; more than one only where a cluster is one block
};

// The first and the last byte of a kernel's library.
struct Image {
    const char *begin, *end;
};

// Runs a grid; returns false, with a message, when the kernel did something wrong.
bool launch(const Launch& parameters, Image image, void (*kernel)(void**), void** arguments);

// The arguments' memory is the host's, and aligned as the host pleases.
template <typename T>
__attribute__((no_sanitize("thread"))) T argument(const void* at) {
    typename Type<T>::Plain value;
    __builtin_memcpy(&value, at, sizeof value);
    return value;
}
template <typename... Parameters, size_t... I>
__attribute__((no_sanitize("thread"))) void call(void (*kernel)(Parameters...), void** arguments,
                                                 Indices<I...>) {
    kernel(argument<Parameters>(arguments[I])...);
}
template <typename... Parameters>
void call(void (*kernel)(Parameters...), void** arguments) {
    call(kernel, arguments, typename IndicesBelow<sizeof...(Parameters)>::Made());
}
// The parameters' sizes, and a zero.
template <typename... Parameters>
const size_t* parameter_sizes(void (*)(Parameters...)) {
    static constexpr size_t sizes[] = {sizeof(Parameters)..., 0};
    return sizes;
}

}  // namespace emulation
