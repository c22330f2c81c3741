// Flags in global memory, by which the blocks of a grid order their accesses to it (PTX ISA, "Memory consistency model":
// release and acquire patterns at the scope of the GPU).
//
// Clocks count within a block, so blocks learn of each other's past by numbered releases: a release keeps its thread's
// clock, an acquire counts the release as known, and what a block did is over for whoever knows a release whose clock
// covers it. Known releases travel through all other synchronisation of a block, and through further releases.
#include <cstring>

#include "machine.h"
#include "memory.h"

namespace emulation {

namespace {

size_t index_of_flag(u64 address, const char* what) {
    if (address % 4) fail("%s at an address that is no multiple of 4", what);
    check_global(address, 4, Access::FLAG, what);
    size_t index = 0;
    for (uint32_t i = 0; i < machine.launch.range_count; ++i) {
        const Range& range = machine.launch.ranges[i];
        const u64 begin = reinterpret_cast<u64>(range.begin);
        if (range.flags != Range::FLAGS) continue;
        if (address >= begin && address < begin + range.bytes) return index + (address - begin) / 4;
        index += range.bytes / 4;
    }
    fail("%s of a word that is no flag", what);
}

// What an acquire learns of the thread that released the flag's value.
void acquire(Flag& flag, uint32_t index) {
    if (!flag.released) return;
    const Clock& theirs = flag.releases.back().clock;
    Clock& mine = self->clock;
    const auto learn = [&](unsigned agent, uint32_t count) { mine.counts[agent] = std::max(mine.counts[agent], count); };
    for (size_t i = 0; i < machine.flags.size(); ++i) learn(Agents::flag(i), theirs.counts[Agents::flag(i)]);
    learn(Agents::flag(index), static_cast<uint32_t>(flag.releases.size()));
    learn(Agents::previous_kernel(), theirs.counts[Agents::previous_kernel()]);
}

void store(Flag& flag, size_t index, u64 address, u32 value, bool releases) {
    flag.released = releases;
    ++flag.stores;
    if (releases) {
        // Whoever knows the last release is taken to know those before it.
        if (self->clock.counts[Agents::flag(index)] != flag.releases.size())
            fail("st.release to flag %zu, which another thread has released without our knowing", index);
        flag.releases.push_back({self->block->index, self->clock});
        self->clock.counts[Agents::flag(index)] = static_cast<uint32_t>(flag.releases.size());
        release();
    }
    memcpy(reinterpret_cast<void*>(address), &value, 4);
    wake_all(flag.waiters);
}

}  // namespace

void make_flags() {
    size_t number = 0;
    for (uint32_t i = 0; i < machine.launch.range_count; ++i)
        if (machine.launch.ranges[i].flags == Range::FLAGS) number += machine.launch.ranges[i].bytes / 4;
    machine.flags.resize(number);
}

bool known(unsigned block, Moment moment) {
    if (block == self->block->index) return moment.before(self->clock);
    for (size_t i = 0; i < machine.flags.size(); ++i)
        for (uint32_t number = 0; number < self->clock.counts[Agents::flag(i)]; ++number) {
            const Flag::Release& release = machine.flags[i].releases[number];
            if (release.block == block && moment.before(release.clock)) return true;
        }
    return false;
}

void load_flag(Output<u32> value, u64 address, bool acquires) {
    maybe_yield(4);
    const uint32_t index = static_cast<uint32_t>(index_of_flag(address, "ld of a flag"));
    Flag& flag = machine.flags[index];
    u32 found;
    memcpy(&found, reinterpret_cast<const void*>(address), 4);
    // Who looks at the same value again waits for another: its turn comes when there is one.
    if (self->last_flag == index && self->last_stores == flag.stores) {
        wait_until(
            flag.waiters, [&] { return flag.stores != self->last_stores; },
            [index, found] { return format("flag %u, which is %u", index, found); });
        memcpy(&found, reinterpret_cast<const void*>(address), 4);
    }
    self->last_flag = index;
    self->last_stores = flag.stores;
    if (acquires) acquire(flag, index);
    value.set(found);
}

void store_flag(u64 address, u32 value, bool releases) {
    maybe_yield(4);
    const size_t index = index_of_flag(address, "st to a flag");
    store(machine.flags[index], index, address, value, releases);
    maybe_yield(4);
}

// One access, which no other thread's comes between: it acquires, then releases.
void add_flag(Output<u32> before, u64 address, u32 value) {
    maybe_yield(4);
    const uint32_t index = static_cast<uint32_t>(index_of_flag(address, "atom.add of a flag"));
    u32 found;
    memcpy(&found, reinterpret_cast<const void*>(address), 4);
    acquire(machine.flags[index], index);
    store(machine.flags[index], index, address, found + value, true);
    before.set(found);
    maybe_yield(4);
}

// Messages: relaxed accesses to words that say themselves whether they have been written. They order nothing else.

constexpr uint64_t MOST_IDLE_LOOKS = 2'000'000;

template <size_t WORDS>
void load_messages(const Array<Output<u32>, WORDS>& values, u64 address) {
    if (address % (4 * WORDS)) fail("ld of %zu messages from an address that is no multiple of %zu", WORDS, 4 * WORDS);
    check_global(address, 4 * WORDS, Access::MESSAGE, "ld of a message");
    maybe_yield(4);
    // Who looks at messages while nobody writes any gives others their turn, however high its priority.
    if (self->looked_at_stores == machine.message_stores) {
        self->warp->priority = machine.random.next();
        if (++machine.idle_looks > MOST_IDLE_LOOKS) {
            const Range* range = range_of(address);
            fail("waits for byte %zu of %s, and all others wait too",
                 static_cast<size_t>(address - reinterpret_cast<u64>(range->begin)), range->name);
        }
        maybe_yield(1);
    }
    self->looked_at_stores = machine.message_stores;
    for (size_t i = 0; i < WORDS; ++i) {
        u32 word;
        memcpy(&word, reinterpret_cast<const void*>(address + 4 * i), 4);
        values[i].set(word);
    }
}
template void load_messages<2>(const Array<Output<u32>, 2>&, u64);
template void load_messages<4>(const Array<Output<u32>, 4>&, u64);

void load_message(Output<u32> value, u64 address) { load_messages<1>({value}, address); }

void store_message(u64 address, u32 value) {
    if (address % 4) fail("st of a message to an address that is no multiple of 4");
    check_global(address, 4, Access::MESSAGE, "st of a message");
    maybe_yield(4);
    memcpy(reinterpret_cast<void*>(address), &value, 4);
    ++machine.message_stores;
    machine.idle_looks = 0;
}

void store_messages(u64 address, const Inputs4& values) {
    if (address % 16) fail("st of four messages to an address that is no multiple of 16");
    // In any order, since each word is a message of its own.
    const size_t first = machine.random.next() % 4;
    for (size_t i = 0; i < 4; ++i) store_message(address + 4 * ((first + i) % 4), values[(first + i) % 4]);
}

void prefetch_map(u64) {}

void trap() { fail("trap"); }

}  // namespace emulation
