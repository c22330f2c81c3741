// Vector clocks: what each agent knows of the others' past.
//
// Two accesses to the same bytes, one of them a write, must be ordered by synchronisation, whatever order a run happens
// to give them (PTX ISA, chapter "Memory consistency model", causality order). Every agent counts its own steps; a
// synchronisation hands over the counts of whoever released it. An access by agent A at A's count c is ordered before
// everything that an agent does once its clock has counts[A] >= c. So a missing barrier is found in every run in which
// the two accesses occur, not only in runs whose timing breaks the result.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulation {

// The larger of each two. Every thread does this at every barrier, for all agents, which is most of a launch's time: a
// vector unit of any age but the first takes several at once.
void raise_to(uint32_t* mine, const uint32_t* theirs, size_t size);

struct Clock {
    std::vector<uint32_t> counts;

    void join(const Clock& other) { raise_to(counts.data(), other.counts.data(), counts.size()); }
};

// One access: who, and when by its own count. A count of 0 is no access at all.
struct Moment {
    uint32_t agent = 0, count = 0;
    bool before(const Clock& clock) const { return clock.counts[agent] >= count; }
};

}  // namespace emulation
