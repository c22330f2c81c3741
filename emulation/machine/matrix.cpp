// Warp-level matrix instructions (PTX ISA, "Warp-Level Matrix Instructions": ldmatrix, stmatrix, mma).
#include <cmath>
#include <cstring>

#include "floats.h"
#include "machine.h"
#include "memory.h"
#include "sparse_places.h"

namespace emulation {

namespace {

struct MatrixOperands {
    unsigned char* row;  // of 16 bytes: lane l gives that of row l % 8 of matrix l / 8
    u32 registers[4];
};

MatrixOperands& matrix_operands(void* const* operands, unsigned lane) {
    return *static_cast<MatrixOperands*>(operands[lane]);
}

// Calls act(the element's memory, the register that holds it, and its shift there) for the four 8x8 matrices' elements.
template <typename ACT>
void each_element(void* const* operands, bool transposed, ACT act) {
    for (unsigned matrix = 0; matrix < 4; ++matrix)
        for (unsigned row = 0; row < 8; ++row)
            for (unsigned column = 0; column < 8; ++column) {
                // A lane's register holds two neighbours of a row or, transposed, of a column.
                const unsigned major = transposed ? column : row, minor = transposed ? row : column;
                act(matrix_operands(operands, 8 * matrix + row).row + 2 * column,
                    matrix_operands(operands, 4 * major + minor / 2).registers[matrix], 16 * (minor % 2));
            }
}

template <bool TRANSPOSED>
void load(Warp&, void* const* operands) {
    each_element(operands, TRANSPOSED, [](const unsigned char* memory, u32& fragment, unsigned shift) {
        u16 element;
        memcpy(&element, memory, 2);
        fragment = (fragment & ~(0xffffu << shift)) | static_cast<u32>(element) << shift;
    });
}

template <bool TRANSPOSED>
void store(Warp&, void* const* operands) {
    each_element(operands, TRANSPOSED, [](unsigned char* memory, u32 fragment, unsigned shift) {
        const u16 element = static_cast<u16>(fragment >> shift);
        memcpy(memory, &element, 2);
    });
}

void transpose(Warp&, void* const* operands) {
    u32 given[LANES];
    for (unsigned lane = 0; lane < LANES; ++lane) given[lane] = *static_cast<const u32*>(operands[lane]);
    // Lane l holds row l / 4, columns 2 (l % 4) + {0, 1}.
    for (unsigned lane = 0; lane < LANES; ++lane) {
        u32 pair = 0;
        for (unsigned half = 0; half < 2; ++half) {
            const unsigned from_row = 2 * (lane % 4) + half, from_column = lane / 4;
            pair |= (given[4 * from_row + from_column / 2] >> 16 * (from_column % 2) & 0xffffu) << 16 * half;
        }
        *static_cast<u32*>(operands[lane]) = pair;
    }
}

struct FragmentOperands {
    float* const* d;
    u32 a[4], b[2];
    float (*widen)(u16);
};

void multiply(Warp&, void* const* operands) {
    double a[16][16], b[16][8], sums[16][8] = {};
    for (unsigned lane = 0; lane < LANES; ++lane) {
        const auto& mine = *static_cast<const FragmentOperands*>(operands[lane]);
        const unsigned row = lane / 4, column = lane % 4 * 2;
        for (unsigned half = 0; half < 2; ++half) {
            for (unsigned i = 0; i < 4; ++i)
                a[row + i % 2 * 8][column + half + i / 2 * 8] = mine.widen(static_cast<u16>(mine.a[i] >> 16 * half));
            for (unsigned i = 0; i < 2; ++i)
                b[column + half + i * 8][row] = mine.widen(static_cast<u16>(mine.b[i] >> 16 * half));
        }
    }
    for (unsigned row = 0; row < 16; ++row)
        for (unsigned k = 0; k < 16; ++k)
            for (unsigned column = 0; column < 8; ++column) sums[row][column] += a[row][k] * b[k][column];
    for (unsigned lane = 0; lane < LANES; ++lane) {
        const auto& mine = *static_cast<const FragmentOperands*>(operands[lane]);
        for (unsigned i = 0; i < 4; ++i) {
            float& d = *mine.d[i];
            d = static_cast<float>(d + sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
        }
    }
}

struct SparseOperands {
    float* const* d;
    u32 a[4], b[4], places, selector;
    float (*widen)(u16);
};

void multiply_sparse(Warp&, void* const* operands) {
    double a[16][16], b[32][8], sums[16][8] = {};
    const u32 selector = static_cast<const SparseOperands*>(operands[0])->selector;
    if (selector > 1) fail("mma.sp with the sparsity selector %u, expected 0 or 1", selector);
    for (unsigned lane = 0; lane < LANES; ++lane) {
        const auto& mine = *static_cast<const SparseOperands*>(operands[lane]);
        if (mine.selector != selector) fail("mma.sp with different sparsity selectors in a warp");
        const unsigned row = lane / 4, column = lane % 4 * 2;
        for (unsigned half = 0; half < 2; ++half)
            for (unsigned i = 0; i < 4; ++i) {
                const unsigned my_row = row + i % 2 * 8, kept = column + half + i / 2 * 8;
                a[my_row][kept] = mine.widen(static_cast<u16>(mine.a[i] >> 16 * half));
                b[column + half + i * 8][row] = mine.widen(static_cast<u16>(mine.b[i] >> 16 * half));
            }
    }
    // Columns that operand A lacks are not multiplied, whatever operand B holds there.
    for (unsigned row = 0; row < 16; ++row)
        for (unsigned kept = 0; kept < 16; ++kept) {
            const int k = sparse_column(row, kept, selector, [&](unsigned lane) {
                return static_cast<const SparseOperands*>(operands[lane])->places;
            });
            for (unsigned column = 0; column < 8; ++column)
                sums[row][column] += k < 0 ? NAN : a[row][kept] * b[k][column];
        }
    for (unsigned lane = 0; lane < LANES; ++lane) {
        const auto& mine = *static_cast<const SparseOperands*>(operands[lane]);
        for (unsigned i = 0; i < 4; ++i) {
            float& d = *mine.d[i];
            d = static_cast<float>(d + sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
        }
    }
}

struct ByteOperands {
    u32 d[4], a[4], b[2];
};

void multiply_bytes(Warp&, void* const* operands) {
    int a[16][32], b[32][8];
    for (unsigned lane = 0; lane < LANES; ++lane) {
        const auto& mine = *static_cast<const ByteOperands*>(operands[lane]);
        for (unsigned byte = 0; byte < 4; ++byte) {
            const unsigned k = lane % 4 * 4 + byte;
            for (unsigned i = 0; i < 4; ++i)
                a[lane / 4 + i % 2 * 8][k + i / 2 * 16] = static_cast<uint8_t>(mine.a[i] >> 8 * byte);
            for (unsigned i = 0; i < 2; ++i) b[k + i * 16][lane / 4] = static_cast<int8_t>(mine.b[i] >> 8 * byte);
        }
    }
    for (unsigned lane = 0; lane < LANES; ++lane) {
        auto& mine = *static_cast<ByteOperands*>(operands[lane]);
        for (unsigned i = 0; i < 4; ++i)
            for (unsigned k = 0; k < 32; ++k)
                mine.d[i] += static_cast<u32>(a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2]);
    }
}

void check_row(u32 address, const char* instruction) {
    if (address % 16) fail("%s with a row at %u, which is no multiple of 16", instruction, address);
}

}  // namespace

void load_matrices(const Outputs4& fragments, u32 address, bool transposed) {
    check_row(address, "ldmatrix");
    // The machine's memory is never constant; that this instruction leaves it alone is seen above.
    MatrixOperands mine = {const_cast<unsigned char*>(read_shared(address, 16, "ldmatrix", now())), {}};
    gather("ldmatrix", &mine, transposed ? load<true> : load<false>);
    for (int i = 0; i < 4; ++i) fragments[i].set(mine.registers[i]);
}

void store_matrices(u32 address, const Inputs4& fragments, bool transposed) {
    check_row(address, "stmatrix");
    MatrixOperands mine = {write_shared(address, 16, "stmatrix", now()),
                           {fragments[0], fragments[1], fragments[2], fragments[3]}};
    gather("stmatrix", &mine, transposed ? store<true> : store<false>);
    maybe_yield(8);
}

void transpose_matrix(Output<u32> result, u32 pair) {
    gather("movmatrix", &pair, transpose);
    result.set(pair);
}

// Sums are exact before they are rounded to float once; hardware rounds earlier and more often.
void multiply_fragments(float* const (&d)[4], const Inputs4& a, const Array<Input<u32>, 2>& b, Element element) {
    FragmentOperands mine = {
        d, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}, element == Element::HALF ? Half::widen : Bfloat16::widen};
    gather("mma", &mine, multiply);
}

void multiply_sparse_fragments(float* const (&d)[4], const Inputs4& a, const Inputs4& b, u32 places, u32 selector,
                               Element element) {
    SparseOperands mine = {d, {a[0], a[1], a[2], a[3]}, {b[0], b[1], b[2], b[3]}, places, selector,
                           element == Element::HALF ? Half::widen : Bfloat16::widen};
    gather("mma.sp", &mine, multiply_sparse);
}

void multiply_byte_fragments(const Outputs4& d, const Inputs4& a, const Array<Input<u32>, 2>& b, const Outputs4&) {
    ByteOperands mine = {{}, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    for (int i = 0; i < 4; ++i) mine.d[i] = *d[i].home;
    gather("mma", &mine, multiply_bytes);
    for (int i = 0; i < 4; ++i) d[i].set(mine.d[i]);
}

}  // namespace emulation
