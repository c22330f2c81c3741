// The PTX instructions that the emulation knows, as functions of their operands in the order of the text. Which
// instruction becomes which function is a table in instructions.py; the chapters are those of the PTX ISA.
#pragma once
#include "device.h"

namespace emulation {

enum class Element { HALF, BFLOAT16, E4M3 };

typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef Array<Output<u32>, 4> Outputs4;
typedef Array<Input<u32>, 4> Inputs4;

// Data movement: ld, mapa (memory.cpp).
void load_constant_v4(const Outputs4& values, u64 address);
void load_constant_u16(Output<u16> value, u64 address);
void load_l2_v4(const Outputs4& values, u64 address);
void load_l2_word(Output<u32> value, u64 address);
template <size_t WORDS>
void store_global(u64 address, const Array<Input<u32>, WORDS>& values);
void load_shared_v4(const Outputs4& values, u32 address);
void store_shared_v4(u32 address, const Inputs4& values);
void store_shared_word(u32 address, u32 value);
void load_cluster_v4(const Array<Output<float>, 4>& values, u32 address);
void map_cluster_address(Output<u32> result, u32 address, u32 rank);

// Asynchronous copies: cp.async, cp.async.bulk.tensor, st.async (copies.cpp).
void copy_async(u32 destination, u64 source, u32 bytes, u32 valid);
void copy_async_commit();
void copy_async_wait(u32 pending);
void copy_tensor_2d(u32 destination, u64 map, const Array<Input<u32>, 2>& at, u32 barrier);
void copy_tensor_3d(u32 destination, u64 map, const Array<Input<u32>, 3>& at, u32 barrier, u64 cache_policy);
void store_async_v4(u32 address, const Inputs4& values, u32 barrier);

// ld, st between the blocks of a grid: .acquire, .release and .relaxed at the scope of the GPU (flags.cpp).
template <size_t WORDS>
void load_messages(const Array<Output<u32>, WORDS>& values, u64 address);
void load_message(Output<u32> value, u64 address);
void store_message(u64 address, u32 value);
void store_messages(u64 address, const Inputs4& values);
void prefetch_map(u64 map);
// The emulation rounds where the hardware approximates.
inline void approximate_exp2(Output<float> result, float x) { result.set(exp2f(x)); }
inline void approximate_log2(Output<float> result, float x) { result.set(log2f(x)); }
inline void approximate_reciprocal(Output<float> result, float x) { result.set(1.f / x); }
inline void approximate_reciprocal_root(Output<float> result, float x) { result.set(1.f / sqrtf(x)); }
void trap();
void load_flag(Output<u32> value, u64 address, bool acquires);
void add_flag(Output<u32> before, u64 address, u32 value);
void store_flag(u64 address, u32 value, bool releases);
template <bool ACQUIRES>
void load_flag(Output<u32> value, u64 address) {
    load_flag(value, address, ACQUIRES);
}
template <bool RELEASES>
void store_flag(u64 address, u32 value) {
    store_flag(address, value, RELEASES);
}

// mbarrier, bar, barrier.cluster, redux, elect, griddepcontrol, setmaxnreg (barriers.cpp).
void barrier_init(u32 barrier, u32 arrivals);
void barrier_init_fence();
void barrier_arrive(Sink, u32 barrier);
void barrier_arrive_expect(Sink, u32 barrier, u32 bytes);
void barrier_try_wait(Output<bool> done, u32 barrier, u32 parity, bool cluster_scope);
template <bool CLUSTER_SCOPE>
void barrier_try_wait(Output<bool> done, u32 barrier, u32 parity) {
    barrier_try_wait(done, barrier, parity, CLUSTER_SCOPE);
}
void block_barrier(u32 index, u32 threads);
void cluster_arrive();
void cluster_arrive_relaxed();
void cluster_wait();
inline void launch_dependents() {}
void wait_for_previous_kernel();
void largest_of_warp(Output<u32> result, u32 value, u32 mask);
void lanes_with_same(Output<u32> result, u32 value, u32 mask);
void sum_of_warp(Output<u32> result, u32 value, u32 mask);
void elect(bool& chosen, u32 mask);
inline void equal(bool& result, u32 a, u32 b) { result = a == b; }
inline void select(Output<u32> result, u32 first, u32 second, bool chosen) { result.set(chosen ? first : second); }
void registers_grow(u32 count);
void registers_shrink(u32 count);

// Warp-level matrix instructions: ldmatrix, stmatrix, movmatrix, mma (matrix.cpp).
void load_matrices(const Outputs4& fragments, u32 address, bool transposed);
void store_matrices(u32 address, const Inputs4& fragments, bool transposed);
void transpose_matrix(Output<u32> result, u32 pair);
void multiply_fragments(float* const (&d)[4], const Inputs4& a, const Array<Input<u32>, 2>& b, Element element);

template <bool TRANSPOSED>
void load_matrices(const Outputs4& fragments, u32 address) {
    load_matrices(fragments, address, TRANSPOSED);
}
template <bool TRANSPOSED>
void store_matrices(u32 address, const Inputs4& fragments) {
    store_matrices(address, fragments, TRANSPOSED);
}
// The kernels accumulate in place: the fourth operand is the first.
template <Element ELEMENT>
void multiply_fragments(const Array<Output<float>, 4>& d, const Inputs4& a, const Array<Input<u32>, 2>& b,
                        const Array<Output<float>, 4>&) {
    multiply_fragments({d[0].home, d[1].home, d[2].home, d[3].home}, a, b, ELEMENT);
}
// Operand A has two of every four columns; `places` says which, in the two lanes of every four that the selector names.
void multiply_sparse_fragments(float* const (&d)[4], const Inputs4& a, const Inputs4& b, u32 places, u32 selector,
                               Element element);

template <Element ELEMENT>
void multiply_sparse_fragments(const Array<Output<float>, 4>& d, const Inputs4& a, const Inputs4& b,
                               const Array<Output<float>, 4>&, u32 places, u32 selector) {
    multiply_sparse_fragments({d[0].home, d[1].home, d[2].home, d[3].home}, a, b, places, selector, ELEMENT);
}
// Operand A unsigned, operand B signed.
void multiply_byte_fragments(const Outputs4& d, const Inputs4& a, const Array<Input<u32>, 2>& b, const Outputs4&);

// Asynchronous warpgroup-level matrix instructions: wgmma (warpgroup.cpp).
void matrix_fence();
void matrix_commit();
void matrix_wait(u32 pending);
// `places`: of a sparse operand A, else null.
void multiply_warpgroup(const Output<float>* d, u32 columns, const Inputs4& a, const Input<u32>* places,
                        u32 selector, u64 descriptor, Element element, bool accumulate);

template <int COLUMNS, Element ELEMENT>
void multiply_warpgroup(const Array<Output<float>, COLUMNS / 2>& d, const Inputs4& a, u64 descriptor,
                        int accumulate, int sign_a, int sign_b, int transpose_b) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS >= 8 && COLUMNS <= 256, "no such shape");
    if (sign_a != 1 || sign_b != 1 || transpose_b != 0) __builtin_trap();
    multiply_warpgroup(d.data(), COLUMNS, a, nullptr, 0, descriptor, ELEMENT, accumulate != 0);
}
// FP8 has no transposed operand B.
template <int COLUMNS>
void multiply_warpgroup_e4m3(const Array<Output<float>, COLUMNS / 2>& d, const Inputs4& a, u64 descriptor,
                             int accumulate, int sign_a, int sign_b) {
    multiply_warpgroup<COLUMNS, Element::E4M3>(d, a, descriptor, accumulate, sign_a, sign_b, 0);
}
template <int COLUMNS, Element ELEMENT>
void multiply_warpgroup_sparse(const Array<Output<float>, COLUMNS / 2>& d, const Inputs4& a, u64 descriptor,
                               const Input<u32>& places, u32 selector, int accumulate, int sign_a, int sign_b,
                               int transpose_b) {
    static_assert(COLUMNS % 8 == 0 && COLUMNS >= 8 && COLUMNS <= 256, "no such shape");
    if (sign_a != 1 || sign_b != 1 || transpose_b != 0) __builtin_trap();
    multiply_warpgroup(d.data(), COLUMNS, a, &places, selector, descriptor, ELEMENT, accumulate != 0);
}

// Arithmetic: lop3, prmt, mov, cvt, dp4a, mul, and add, sub, mul, fma on pairs of 16-bit floats (arithmetic.cpp).
void combine_bits(Output<u32> result, u32 a, u32 b, u32 c, u32 table);
void permute_bytes(Output<u32> result, u32 a, u32 b, u32 selector);
void dot_bytes(Output<u32> result, u32 a, u32 b, u32 c);
// Plus c, of which only zero is known.
void byte_distances(Output<u32> result, u32 a, u32 b, u32 c);
inline void count_bits(Output<u32> result, u32 value) { result.set(__builtin_popcount(value)); }
void round_to_int(Output<u32> result, float value);
inline void multiply_floats(Output<float> result, float a, float b) { result.set(a * b); }
void truncate_to_u16(Output<u16> result, u32 value);
void move_halves(const Array<Output<u16>, 2>& halves, u32 pair);
void move_halves(Output<u32> pair, const Array<Output<u16>, 2>& halves);
template <Element ELEMENT>
void widen(Output<float> result, u16 value);
template <Element ELEMENT>
void narrow_pair(Output<u32> result, float high, float low);
void narrow_pair_to_e4m3(Output<u16> result, float high, float low);
template <Element ELEMENT>
void add_pairs(Output<u32> result, u32 a, u32 b);
template <Element ELEMENT>
void subtract_pairs(Output<u32> result, u32 a, u32 b);
template <Element ELEMENT>
void multiply_pairs(Output<u32> result, u32 a, u32 b);
template <Element ELEMENT>
void multiply_add_pairs(Output<u32> result, u32 a, u32 b, u32 c);

}  // namespace emulation
