#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <set>
#include <string>
#include <system_error>

#include "error.h"

namespace slip {
namespace {

constexpr int64_t kWorkerSpinNs = 50'000;  // then a worker sleeps: the next phase of the same step comes sooner than that
constexpr int64_t kCallerSpinNs = 20'000;  // for a chunk in another's hands; then the CPU is offered to whoever holds it
constexpr int64_t kShortestSoloNs = 500'000;
constexpr int64_t kLongestSoloNs = 40'000'000;
constexpr int kIdlePhases = 12;     // phases in a row that workers hardly took part in, before the caller goes alone
constexpr int kHelpfulPhases = 64;  // good ones after which the next solo is a short one again
constexpr uint64_t kMaxUnits = 0xffff;

thread_local bool inside = false;  // this thread is in a chunk
thread_local int inside_thread = 0;

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
    static_assert(sizeof(word) == sizeof(uint32_t));
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

struct Ticket {
    uint32_t front, back, units;
    explicit Ticket(uint64_t word) : front(word & 0xffff), back(word >> 16 & 0xffff), units(word >> 32 & 0xffff) {}
    bool open() const { return front + back < units; }
};

std::string first_line(const char* path) {
    std::string line;
    if (FILE* file = fopen(path, "r")) {
        char text[256];
        if (fgets(text, sizeof text, file)) line = text;
        fclose(file);
    }
    return line;
}

alignas(Pool) unsigned char storage[sizeof(Pool)];

void start_anew_in_child() {
    const int threads = reinterpret_cast<Pool*>(storage)->threads();
    (new (storage) Pool)->set_threads(threads);  // the parent's workers do not exist here; what they held is left as it is
    inside = false;
}

}  // namespace

// A phase's chunks go out in units of equal size, so that their numbers fit the ticket.
bool Pool::claim(uint32_t& unit, bool from_back) {
    uint64_t word = ticket_.load(std::memory_order_acquire);
    for (;;) {
        const Ticket ticket(word);
        if (!ticket.open()) return false;
        if (ticket_.compare_exchange_weak(word, word + (from_back ? 0x10000 : 1), std::memory_order_acq_rel)) {
            unit = from_back ? ticket.units - 1 - ticket.back : ticket.front;
            return true;
        }
    }
}

void Pool::do_unit(uint32_t unit, int thread) {
    const int64_t begin = unit * chunks_per_unit_;
    const int64_t end = std::min(num_chunks_, begin + chunks_per_unit_);
    if (thread == 0) {
        for (int64_t chunk = begin; chunk < end; ++chunk) body_(argument_, chunk, thread);
    } else {
        for (int64_t chunk = end; chunk-- > begin;) body_(argument_, chunk, thread);
    }
}

void Pool::work(Worker& self, int thread) {
    const FloatMode mode;
    inside = true;
    inside_thread = thread;
    while (!stop_.load(std::memory_order_acquire)) {
        uint32_t unit;
        while (claim(unit, true)) {
            do_unit(unit, thread);
            helped_.fetch_add(1, std::memory_order_release);
        }
        const uint32_t seen = bell_.load(std::memory_order_seq_cst);
        const int64_t until = now_ns() + kWorkerSpinNs;
        bool is_open = false;
        do {
            const int cpu = sched_getcpu();
            self.cpu.store(cpu, std::memory_order_relaxed);
            if (cpu == caller_cpu_.load(std::memory_order_relaxed)) break;  // spinning here would only keep the caller off it
            for (int i = 0; i < 16 && !is_open; ++i) {
                is_open = Ticket(ticket_.load(std::memory_order_relaxed)).open();
                _mm_pause();
            }
        } while (!is_open && now_ns() < until);
        if (!is_open) sleep_unless_open(seen);
    }
}

// The caller opens the ticket first and looks for sleepers second; here it is the other way round, so one of both sees the other.
bool Pool::sleep_unless_open(uint32_t seen) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const bool is_open = Ticket(ticket_.load(std::memory_order_seq_cst)).open() || stop_.load(std::memory_order_seq_cst);
    if (!is_open) futex(bell_, FUTEX_WAIT, seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return !is_open;
}

// Whether workers would be in the way: they share the caller's CPU, or did not come. The caller then works alone for a while,
// twice as long each time that the trial after it fails.
bool Pool::stays_solo(int64_t now) {
    if (now < solo_until_ns_) return true;
    const int cpu = sched_getcpu();
    caller_cpu_.store(cpu, std::memory_order_relaxed);
    const bool is_shared =
        sleepers_.load(std::memory_order_relaxed) == 0 &&
        std::all_of(workers_.begin(), workers_.end(),
                    [cpu](const auto& worker) { return worker->cpu.load(std::memory_order_relaxed) == cpu; });
    if (!is_shared && idle_phases_ < kIdlePhases) return false;
    solo_ns_ = helpful_phases_ >= kHelpfulPhases ? kShortestSoloNs : std::clamp(solo_ns_ * 2, kShortestSoloNs, kLongestSoloNs);
    solo_until_ns_ = now + solo_ns_;
    helpful_phases_ = idle_phases_ = 0;
    for (const auto& worker : workers_) worker->cpu.store(-1, std::memory_order_relaxed);
    return true;
}

void Pool::dispatch(int64_t num_chunks, Body body, void* argument) {
    if (num_chunks <= 0) return;
    if (inside) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) body(argument, chunk, inside_thread);
        return;
    }
    const FloatMode mode;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (started_for_ != threads()) {
        stop_workers();
        start_workers();
    }
    inside = true;
    if (workers_.empty() || num_chunks == 1 || stays_solo(now_ns())) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) body(argument, chunk, 0);
    } else {
        together(num_chunks, body, argument);
    }
    inside = false;
}

void Pool::together(int64_t num_chunks, Body body, void* argument) {
    body_ = body;
    argument_ = argument;
    num_chunks_ = num_chunks;
    chunks_per_unit_ = (num_chunks + kMaxUnits - 1) / kMaxUnits;
    const uint32_t units = (num_chunks + chunks_per_unit_ - 1) / chunks_per_unit_;
    helped_.store(0, std::memory_order_relaxed);
    ticket_.store(uint64_t(units) << 32, std::memory_order_seq_cst);
    if (const int asleep = sleepers_.load(std::memory_order_seq_cst)) {
        bell_.fetch_add(1, std::memory_order_seq_cst);
        futex(bell_, FUTEX_WAKE, std::min<uint32_t>(asleep, units - 1));
    }
    uint32_t unit, own = 0;
    while (claim(unit, false)) {
        do_unit(unit, 0);
        ++own;
    }
    const uint32_t others = units - own;
    if (units >= 8) {
        if (others * 8 < units) {
            ++idle_phases_;
        } else {
            idle_phases_ = 0;
            ++helpful_phases_;
        }
    }
    if (helped_.load(std::memory_order_acquire) == others) return;
    const int64_t until = now_ns() + kCallerSpinNs;
    while (helped_.load(std::memory_order_acquire) != others) {
        if (now_ns() > until) {
            sched_yield();
        } else {
            for (int i = 0; i < 8; ++i) _mm_pause();
        }
    }
}

void Pool::start_workers() {
    started_for_ = threads();
    stop_.store(false, std::memory_order_relaxed);
    // Signals are the process's own threads' business: a worker starts with all of them blocked.
    sigset_t all, former;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &former);
    try {
        while (int(workers_.size()) + 1 < started_for_) {
            workers_.push_back(std::make_unique<Worker>());
            Worker& worker = *workers_.back();
            worker.thread = std::thread([this, &worker, thread = int(workers_.size())] { work(worker, thread); });
        }
    } catch (const std::system_error&) {
        workers_.pop_back();  // the system gives no more threads: those that there are do
    }
    pthread_sigmask(SIG_SETMASK, &former, nullptr);
}

void Pool::stop_workers() {
    stop_.store(true, std::memory_order_seq_cst);
    bell_.fetch_add(1, std::memory_order_seq_cst);
    futex(bell_, FUTEX_WAKE, kMaxThreads);
    for (const auto& worker : workers_) worker->thread.join();
    workers_.clear();
}

void Pool::set_threads(int n) { threads_.store(std::clamp(n, 1, kMaxThreads), std::memory_order_relaxed); }

Pool& pool() {
    static Pool* const only = [] {
        Pool* made = new (storage) Pool;  // never destroyed: workers may outlive static destructors
        made->set_threads(usable_cores());
        pthread_atfork(nullptr, nullptr, start_anew_in_child);
        return made;
    }();
    return *only;
}

int usable_cores() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
    std::set<std::string> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &allowed)) continue;
        char path[96];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
        const std::string siblings = first_line(path);
        cores.insert(siblings.empty() ? std::to_string(cpu) : siblings);
    }
    int count = std::max<int>(1, cores.size());
    long quota, period;
    if (sscanf(first_line("/sys/fs/cgroup/cpu.max").c_str(), "%ld %ld", &quota, &period) == 2 && quota > 0 && period > 0) {
        count = std::min<int>(count, (quota + period - 1) / period);
    }
    return std::clamp(count, 1, Pool::kMaxThreads);
}

}  // namespace slip

extern "C" int slip_set_threads(int n) {
    if (n < 1 || n > slip::Pool::kMaxThreads) return slip::kBadThreads;
    slip::pool().set_threads(n);
    return slip::kOk;
}

extern "C" int slip_threads() { return slip::pool().threads(); }
