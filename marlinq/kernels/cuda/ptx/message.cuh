// Words in global memory that one block writes and others wait for, without any other synchronisation.
#pragma once
#include "ptx/types.cuh"

__device__ __forceinline__ void store_word(void* pointer, u32 word) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(pointer), "r"(word) : "memory");
}

__device__ __forceinline__ void store_words(void* pointer, const u32 (&words)[4]) {
    asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

// One, two or four neighbouring words. Each word is read atomically, the vector need not be.
__device__ __forceinline__ void load_words(u32 (&words)[1], const void* pointer) {
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(words[0]) : "l"(pointer) : "memory");
}
__device__ __forceinline__ void load_words(u32 (&words)[2], const void* pointer) {
    asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(pointer) : "memory");
}
__device__ __forceinline__ void load_words(u32 (&words)[4], const void* pointer) {
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(pointer)
                 : "memory");
}

// Ends the kernel with an error that the host sees.
__device__ __forceinline__ void trap() { asm volatile("trap;" ::: "memory"); }
