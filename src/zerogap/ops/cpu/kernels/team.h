// The threads that run a list of commands together, and the C ABI's Command.
//
// All threads of a team execute every command; a command's work is claimed item by item (`next`), so who computes what
// is a matter of timing, and no bit may depend on it. A barrier follows every command. Threads spin for some tens of
// microseconds at barriers and between runs, then sleep on a futex.
#pragma once
#include <cstdint>
#include "simd.h"

namespace zg {

constexpr int PHASES = 8;  // independent item counters of one command

struct Barrier;
struct Counters { int64_t value[PHASES]; };  // one cache line, zero at the start of a run

struct Team {
    int rank, size;
    Barrier* shared;
    Counters* counters;  // of the command that runs
    char* scratch;       // this thread's scratch memory, grows on demand
    int64_t scratch_size;

    void barrier();
    // Claims the next item of `phase` (0 .. PHASES-1); items ascend from 0 without gaps.
    int64_t next(int phase) { return __atomic_fetch_add(&counters->value[phase], 1, __ATOMIC_RELAXED); }
    // At least `bytes` of thread-private, 64-byte aligned, uninitialised memory, valid until the next call.
    void* scratch_bytes(int64_t bytes);
};

// One op with its arguments. Every argument struct starts with `int64_t rows`; where `rows_from` >= 0, the runner
// replaces it by symbols[rows_from], so that a recorded list of commands serves any number of rows.
struct Command {
    int32_t op;
    int32_t rows_from;
    alignas(8) unsigned char args[504];
};
static_assert(sizeof(Command) == 512, "mirrored by ops/cpu/library.py");

typedef void (*OpFunction)(const void* args, Team& team);
struct OpEntry { const char* name; OpFunction run; int64_t args_size; };
extern const OpEntry OPS[];
extern const int NUM_OPS;

}  // namespace zg
