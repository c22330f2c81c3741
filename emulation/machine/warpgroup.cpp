// Asynchronous warpgroup-level matrix instructions (PTX ISA, chapter of that name): wgmma with operand A, dense or sparse, in
// registers.
//
// A product runs as late as the rules allow: when its thread waits for it. Its operands are read then, so whatever was
// overwritten too early is found. Until then its accumulators hold NaN; their values are kept aside.
#include <cmath>
#include <cstring>

#include "floats.h"
#include "machine.h"
#include "memory.h"
#include "sparse_places.h"

namespace emulation {

namespace {

constexpr u32 PENDING_BITS = 0x7fdeadadu;  // a NaN
constexpr unsigned WARPGROUP = 4;          // warps

// Operand B: K-major rows of 128 bytes with the 128-byte swizzle. Bits of a matrix descriptor as in "Matrix Descriptor
// Format"; for this swizzle the leading dimension's offset is not used.
struct OperandB {
    u32 start, atom_stride;
    explicit OperandB(u64 descriptor)
        : start((descriptor & 0x3fff) << 4), atom_stride((descriptor >> 32 & 0x3fff) << 4) {
        if (descriptor >> 62 != 1) fail("wgmma with a descriptor of swizzle %u; 128 bytes (1) is emulated",
                                        static_cast<unsigned>(descriptor >> 62));
        if (descriptor >> 49 & 7) fail("wgmma with a descriptor whose base offset is not 0");
    }
    // A column's 16 contiguous bytes of that number: 8 channels of 16 bits, or 16 channels of FP8.
    u32 piece(u32 column, u32 number) const {
        const u32 address = start + column / 8 * atom_stride + column % 8 * 128 + number * 16;
        return address ^ (address >> 7 & 7) << 4;
    }
};

// Whether the thread wrote a variable since its fence of that number: asynchronous products use registers from the
// fence to the wait, and nobody may write them in between.
bool written_since(const Fiber& fiber, const void* home, uint32_t fence) {
    const size_t on_stack = static_cast<size_t>(static_cast<const char*>(home) - fiber.stack);
    return on_stack < STACK_BYTES && fiber.stamps[on_stack / 4] >= fence;
}

Accumulators& accumulators_of(Fiber& fiber, const std::vector<float*>& d) {
    auto& all = fiber.products.accumulators;
    for (Accumulators& known : all) {
        if (known.home == d) return known;
        if (known.home[0] == d[0]) fail("wgmma of another shape on accumulators in flight");
    }
    all.push_back({d, std::vector<float>(d.size()), fiber.last_fence, 0});
    for (size_t i = 0; i < d.size(); ++i) {
        all.back().value[i] = *d[i];
        memcpy(d[i], &PENDING_BITS, 4);
    }
    return all.back();
}

// Pieces of 16 bytes that a product reads of a column of operand B.
u32 pieces(const Product& product) { return product.places ? 4 : 2; }

// Widens the channels of 16 bytes; returns their number.
u32 widen_piece(const unsigned char* bytes, Element element, double (&values)[16]) {
    if (element == Element::E4M3) {
        for (u32 i = 0; i < 16; ++i) values[i] = widen_e4m3(bytes[i]);
        return 16;
    }
    u16 halves[8];
    memcpy(halves, bytes, 16);
    for (u32 i = 0; i < 8; ++i) values[i] = element == Element::HALF ? Half::widen(halves[i]) : Bfloat16::widen(halves[i]);
    return 8;
}

// One product of one warp, whose lanes hold 16 of the 64 rows.
void execute(Warp& warp, size_t group, size_t index) {
    const auto lanes = warp.block->fibers.begin() + warp.index * LANES;
    const Product& first = lanes[0]->products.groups[group][index];
    const size_t columns = first.d.size() * 2;
    // Columns of operand A that the registers hold: two of 16 bits or four of 8 bits each.
    const u32 in_register = first.element == Element::E4M3 ? 4 : 2, all_kept = 8 * in_register;
    double a[16][32];
    for (unsigned lane = 0; lane < LANES; ++lane) {
        const Product& mine = lanes[lane]->products.groups[group][index];
        if (mine.descriptor != first.descriptor || mine.selector != first.selector || mine.d.size() != first.d.size())
            fail("the lanes of a warp give a wgmma different descriptors or selectors");
        if (mine.places && written_since(*lanes[lane], mine.places->home, mine.fence))
            fail("the places of a sparse wgmma were overwritten before the product was waited for");
        for (unsigned i = 0; i < 4; ++i) {
            const Input<u32>& pair = mine.a[i];
            if (written_since(*lanes[lane], pair.home, mine.fence))
                fail("a register of operand A of a wgmma was overwritten before the product was waited for");
            unsigned char bytes[16] = {};
            const u32 bits = pair;
            memcpy(bytes, &bits, 4);
            double values[16];
            widen_piece(bytes, first.element, values);
            for (u32 part = 0; part < in_register; ++part)
                a[lane / 4 + i % 2 * 8][(lane % 4 + i / 2 * 4) * in_register + part] = values[part];
        }
    }
    const OperandB operand(first.descriptor);
    const Moment moment = {Agents::products_of(warp), lanes[0]->products.completed + 1};
    static double b[32][256], sums[16][256];
    for (u32 column = 0; column < columns; ++column)
        for (u32 number = 0; number < pieces(first); ++number) {
            double values[16];
            const u32 count = widen_piece(read_shared(operand.piece(column, number), 16, "wgmma", moment), first.element, values);
            for (u32 i = 0; i < count; ++i) b[count * number + i][column] = values[i];
        }
    for (unsigned row = 0; row < 16; ++row) {
        std::fill(sums[row], sums[row] + columns, 0.0);
        for (unsigned kept = 0; kept < all_kept; ++kept) {
            const int k = !first.places ? static_cast<int>(kept) : sparse_column(row, kept, first.selector, [&](unsigned lane) {
                return static_cast<u32>(*lanes[lane]->products.groups[group][index].places);
            });
            for (size_t column = 0; column < columns; ++column)
                sums[row][column] += k < 0 ? NAN : a[row][kept] * b[k][column];
        }
    }
    for (unsigned lane = 0; lane < LANES; ++lane) {
        ProductQueue& queue = lanes[lane]->products;
        const Product& mine = queue.groups[group][index];
        Accumulators& accumulators = accumulators_of(*lanes[lane], mine.d);
        for (size_t i = 0; i < mine.d.size(); ++i) {
            const unsigned row = lane / 4 + i / 2 % 2 * 8;
            const size_t column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            accumulators.value[i] = static_cast<float>(accumulators.value[i] + sums[row][column]);
        }
        ++queue.completed;
        if (--accumulators.in_flight) continue;
        for (size_t i = 0; i < mine.d.size(); ++i) {
            if (written_since(*lanes[lane], mine.d[i], accumulators.fence))
                fail("an accumulator of a wgmma was written before the product was waited for");
            *mine.d[i] = accumulators.value[i];
        }
        std::swap(accumulators, queue.accumulators.back());
        queue.accumulators.pop_back();
    }
}

void complete(Warp& warp, void* const* operands) {
    const u32 pending = *static_cast<const u32*>(operands[0]);
    ProductQueue& first = warp.block->fibers[warp.index * LANES]->products;
    for (size_t group = first.completed_groups; group + pending < first.groups.size(); ++group) {
        for (size_t index = 0; index < first.groups[group].size(); ++index) execute(warp, group, index);
        for (unsigned lane = 0; lane < LANES; ++lane) {
            ProductQueue& queue = warp.block->fibers[warp.index * LANES + lane]->products;
            queue.groups[group].clear();
            queue.completed_groups = static_cast<u32>(group + 1);
        }
    }
}

}  // namespace

void matrix_fence() {
    gather("wgmma.fence", nullptr, [](Warp&, void* const*) { ++machine.fences; });
    self->last_fence = machine.fences;
}

void matrix_commit() {
    gather("wgmma.commit_group", nullptr, [](Warp& warp, void* const*) {
        const auto first = warp.block->fibers.begin() + warp.index * LANES;
        const size_t number = first[0]->products.open.size();
        for (unsigned lane = 0; lane < LANES; ++lane) {
            ProductQueue& queue = first[lane]->products;
            if (queue.open.size() != number)
                fail("the lanes of a warp commit different numbers of products");
            queue.groups.push_back(std::move(queue.open));
            queue.open.clear();
        }
    });
}

void matrix_wait(u32 pending) {
    gather("wgmma.wait_group", &pending, complete);
    self->clock.counts[Agents::products_of(*self->warp)] = self->products.completed;
    maybe_yield(8);
}

void multiply_warpgroup(const Output<float>* d, u32 columns, const Inputs4& a, const Input<u32>* places,
                        u32 selector, u64 descriptor, Element element, bool accumulate) {
    ProductQueue& queue = self->products;
    if (!self->last_fence) fail("wgmma without a wgmma.fence before it");
    if (selector > 1) fail("wgmma.sp with the sparsity selector %u, expected 0 or 1", selector);
    const OperandB operand(descriptor);
    Product product = {{}, a, {}, selector, descriptor, element, self->last_fence};
    if (places) product.places = *places;
    // The whole operand must be there; one lane's look suffices.
    if (self->lane == 0)
        for (u32 column = 0; column < columns; ++column)
            for (u32 number = 0; number < pieces(product); ++number) {
                check_readable(operand.piece(column, number), 16, "wgmma");
                check_async_proxy(operand.piece(column, number), 16, "wgmma");
            }
    product.d.reserve(columns / 2);
    for (u32 i = 0; i < columns / 2; ++i) product.d.push_back(d[i].home);
    bool fenced = true;
    if (places) fenced &= !written_since(*self, places->home, self->last_fence);
    for (const Input<u32>& pair : a.items) fenced &= !written_since(*self, pair.home, self->last_fence);
    for (const float* home : product.d) fenced &= !written_since(*self, home, self->last_fence);
    if (!fenced) fail("wgmma with registers that were written after wgmma.fence");
    Accumulators& accumulators = accumulators_of(*self, product.d);
    if (!accumulate) std::fill(accumulators.value.begin(), accumulators.value.end(), 0.f);
    ++accumulators.in_flight;
    queue.history = (queue.history ^ descriptor ^ columns ^ selector << 16) * 0x100000001b3ull;
    ++queue.issued;
    queue.open.push_back(std::move(product));
}

void check_products_at_exit(const Fiber& fiber) {
    if (fiber.products.issued != fiber.products.completed) fail("the thread ends with a wgmma in flight");
}

// The four warps of a warpgroup execute the same products on the same operand B, and change their registers together.
void check_warpgroups(const Block& block) {
    for (size_t warp = 0; warp < block.warps.size(); ++warp) {
        const size_t first = warp / WARPGROUP * WARPGROUP;
        const Fiber &mine = *block.fibers[warp * LANES], &leader = *block.fibers[first * LANES];
        if (mine.products.history != leader.products.history)
            fail("warps %zu and %zu of a warpgroup of block %u executed different products", first, warp, block.index);
        if (mine.registers != leader.registers)
            fail("setmaxnreg by some warps of a warpgroup: %u registers for warp %zu of block %u, %u for warp %zu",
                 leader.registers, first, block.index, mine.registers, warp);
    }
}

}  // namespace emulation
