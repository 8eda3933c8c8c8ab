// Thread team: persistent workers, spin-then-futex barriers, and the runner of command lists.
#include "team.h"
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <pthread.h>
#include <signal.h>
#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace zg {
namespace {

constexpr int MAX_THREADS = 256;
constexpr int SPINS = 2000;  // about 40 microseconds

inline void relax() {
#if defined(__SSE2__)
    _mm_pause();
#else
    sched_yield();
#endif
}

// Sleep while *word == seen; wake-ups may be spurious.
inline void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
    (void)word; (void)seen; sched_yield();
#endif
}
inline void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, MAX_THREADS, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

// A counter that threads wait on: bumped by one, with a wake-up only when somebody sleeps.
struct alignas(64) Gate {
    std::atomic<uint32_t> generation{0};
    std::atomic<int32_t> sleepers{0};
    void open() {
        generation.fetch_add(1);
        if (sleepers.load()) wake_all(generation);
    }
    void wait_past(uint32_t seen) {
        for (int i = 0; i < SPINS; i++) {
            if (generation.load(std::memory_order_acquire) != seen) return;
            relax();
        }
        sleepers.fetch_add(1);
        while (generation.load() == seen) sleep_on(generation, seen);
        sleepers.fetch_sub(1);
    }
};

}  // namespace

struct Barrier {
    std::atomic<int32_t> arrived{0};
    Gate gate;
};

void Team::barrier() {
    if (size == 1) return;
    uint32_t seen = shared->gate.generation.load();
    if (shared->arrived.fetch_add(1) + 1 == size) {
        shared->arrived.store(0);
        shared->gate.open();
    } else {
        shared->gate.wait_past(seen);
    }
}

void* Team::scratch_bytes(int64_t bytes) {
    if (bytes > scratch_size) {
        free(scratch);
        scratch_size = (bytes + 4095) / 4096 * 4096;
        scratch = static_cast<char*>(aligned_alloc(64, scratch_size));
        if (!scratch) abort();
    }
    return scratch;
}

namespace {

// Flush-to-zero and denormals-are-zero for the duration of a run.
struct FlushSubnormals {
#if defined(__SSE2__)
    unsigned saved = _mm_getcsr();
    FlushSubnormals() { _mm_setcsr(saved | 0x8040); }
    ~FlushSubnormals() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
    uint64_t saved;
    FlushSubnormals() {
        asm volatile("mrs %0, fpcr" : "=r"(saved));
        asm volatile("msr fpcr, %0" : : "r"(saved | (uint64_t(1) << 24)));
    }
    ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(saved)); }
#endif
};

struct Job {
    const Command* commands;
    int32_t count;
    const int64_t* symbols;
    int size;
    Counters* counters;
};

// Workers that a run does not need stay asleep: each has a gate of its own. A run ends with the barrier of its last
// command, after which no worker looks at the job, so nothing else has to be waited for.
struct Pool {
    std::mutex callers;  // one run at a time
    Barrier barrier;
    Job job{};
    int workers = 0;
    Gate start[MAX_THREADS];  // of the worker with that rank
    int processor[MAX_THREADS];  // where the rank was when the run began, -1 if unknown
    Team caller{};
};
Pool* pool = new Pool;  // never destroyed: workers outlive static destruction

// Workers do not survive fork(): the child starts over with fresh ones (the parent's pool may be in any state).
const int at_fork = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

void execute(const Job& job, Team& team) {
    FlushSubnormals flush;
    alignas(8) unsigned char args[sizeof(Command::args)];
    for (int32_t i = 0; i < job.count; i++) {
        const Command& command = job.commands[i];
        team.counters = job.counters + i;
        const void* ready = command.args;
        if (command.rows_from >= 0) {
            __builtin_memcpy(args, command.args, sizeof(args));
            __builtin_memcpy(args, &job.symbols[command.rows_from], sizeof(int64_t));
            ready = args;
        }
        OPS[command.op].run(ready, team);
        team.barrier();
    }
}

#if defined(__linux__)
// A scheduler may wake a worker on the processor of the thread that woke it and leave both there for seconds, taking
// turns, while another processor idles. A rank that finds itself on a lower rank's processor asks to be elsewhere, and
// is free to be moved again afterwards. Only speed depends on it.
void spread(Pool* p, int rank) {
    const int here = sched_getcpu();
    bool shared = false;
    for (int other = 0; other < rank; other++) shared |= __atomic_load_n(&p->processor[other], __ATOMIC_RELAXED) == here;
    __atomic_store_n(&p->processor[rank], here, __ATOMIC_RELAXED);
    cpu_set_t allowed, free_ones;
    if (!shared || here < 0 || sched_getaffinity(0, sizeof(allowed), &allowed)) return;
    free_ones = allowed;
    for (int other = 0; other < rank; other++) {
        const int taken = __atomic_load_n(&p->processor[other], __ATOMIC_RELAXED);
        if (taken >= 0 && taken < CPU_SETSIZE) CPU_CLR(taken, &free_ones);
    }
    if (!CPU_COUNT(&free_ones) || sched_setaffinity(0, sizeof(free_ones), &free_ones)) return;
    sched_setaffinity(0, sizeof(allowed), &allowed);
    __atomic_store_n(&p->processor[rank], sched_getcpu(), __ATOMIC_RELAXED);
}
#else
void spread(Pool*, int) {}
#endif

struct Start { Pool* pool; int rank; uint32_t seen; };

void* worker(void* given) {
    const Start start = *static_cast<Start*>(given);
    delete static_cast<Start*>(given);
    Team team{};
    team.rank = start.rank;
    team.shared = &start.pool->barrier;
    for (uint32_t seen = start.seen;; seen++) {
        start.pool->start[start.rank].wait_past(seen);
        const Job job = start.pool->job;
        spread(start.pool, start.rank);
        team.size = job.size;
        execute(job, team);
    }
    return nullptr;
}

bool grow(Pool* p, int threads) {
    while (p->workers < threads - 1) {
        const int rank = p->workers + 1;
        Start* start = new Start{p, rank, p->start[rank].generation.load()};
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        sigset_t all, before;  // signals are for the threads of the program, not for these
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_t id;
        const int error = pthread_create(&id, &attributes, worker, start);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        pthread_attr_destroy(&attributes);
        if (error) { delete start; return false; }
        p->workers++;
    }
    return true;
}

}  // namespace
}  // namespace zg

using namespace zg;

extern "C" {

int32_t zg_num_ops() { return NUM_OPS; }
const char* zg_op_name(int32_t op) { return OPS[op].name; }
int64_t zg_op_args_size(int32_t op) { return OPS[op].args_size; }
const char* zg_build_id() { return ZG_BUILD_ID; }
const char* zg_isa() { return ZG_ISA_NAME; }

// True if this processor runs the build whose file name says `isa`. Only asked of the portable build.
int32_t zg_supports(const char* isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(isa, "avx512bf16"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
    if (!strcmp(isa, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return !strcmp(isa, "portable");
}

// Runs `count` commands with `threads` threads. Returns 0, or 1 where threads could not be started, 2 out of memory.
int32_t zg_run(const Command* commands, int32_t count, const int64_t* symbols, int32_t threads) {
    if (count <= 0) return 0;
    if (threads < 1) threads = 1;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    Pool* p = pool;
    std::lock_guard<std::mutex> lock(p->callers);
    if (!grow(p, threads)) return 1;
    Counters* counters = static_cast<Counters*>(aligned_alloc(64, sizeof(Counters) * count));
    if (!counters) return 2;
    memset(counters, 0, sizeof(Counters) * count);
    const Job job{commands, count, symbols, threads, counters};
    Team& team = p->caller;
    team.rank = 0;
    team.size = threads;
    team.shared = &p->barrier;
    p->job = job;
#if defined(__linux__)
    __atomic_store_n(&p->processor[0], sched_getcpu(), __ATOMIC_RELAXED);
#endif
    for (int rank = 1; rank < threads; rank++) p->start[rank].open();
    execute(job, team);
    free(counters);
    return 0;
}

}  // extern "C"
