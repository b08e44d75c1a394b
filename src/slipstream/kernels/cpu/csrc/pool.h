// Threads that help the caller through phases of small chunks.
//
//   chunks of a phase   0 1 2 3 4 5 6 7 8 9
//                       caller -->   <-- workers          each chunk is claimed by one compare-and-swap on the ticket
//
// The caller could finish every phase alone; workers only help. Nobody waits for a thread to arrive, only for chunks that
// one has already claimed, so a worker that the system does not run costs at most one chunk.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace slip {

// Round to nearest, flush denormals, no traps; the former state comes back at the end of the scope.
class FloatMode {
public:
    FloatMode() : former_(_mm_getcsr()) { _mm_setcsr(0x1f80 | 0x8040); }
    ~FloatMode() { _mm_setcsr(former_); }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

private:
    unsigned former_;
};

class Pool {
public:
    static constexpr int kMaxThreads = 64;

    // Calls f(int64_t chunk, int thread) for each chunk in [0, num_chunks) exactly once and returns when all are done.
    //
    // `thread` is in [0, threads()), 0 for the caller, and no two calls with the same number run at once: it may name
    // scratch memory within a phase. Which thread takes which chunk is not fixed, so f's results must not depend on it.
    // f must not throw. All that the caller wrote before is visible to f, all that f wrote to the caller after.
    // Runs inside FloatMode. A second calling thread waits for the first one's phase; a call from inside f runs in place.
    template <class F>
    void run(int64_t num_chunks, F&& f) {
        using Body = std::remove_reference_t<F>;
        dispatch(num_chunks, [](void* body, int64_t chunk, int thread) { (*static_cast<Body*>(body))(chunk, thread); },
                 const_cast<void*>(static_cast<const void*>(std::addressof(f))));
    }

    // Threads of a phase, the caller's included.
    int threads() const { return threads_.load(std::memory_order_relaxed); }

    // Takes effect with the next phase. n is clamped to [1, kMaxThreads].
    void set_threads(int n);

private:
    using Body = void (*)(void*, int64_t, int);
    struct alignas(64) Worker {
        std::atomic<int> cpu{-1};
        std::thread thread;
    };

    void dispatch(int64_t num_chunks, Body body, void* argument);
    void together(int64_t num_chunks, Body body, void* argument);
    void work(Worker& self, int thread);
    bool claim(uint32_t& unit, bool from_back);
    void do_unit(uint32_t unit, int thread);
    bool sleep_unless_open(uint32_t seen);
    bool stays_solo(int64_t now);
    void start_workers();
    void stop_workers();

    std::atomic<int> threads_{1};
    std::mutex mutex_;  // held for a phase; guards all below that is not atomic

    alignas(64) std::atomic<uint64_t> ticket_{0};  // units:16 | back:16 | front:16
    alignas(64) std::atomic<uint32_t> helped_{0};  // units that workers have done in this phase
    alignas(64) std::atomic<uint32_t> bell_{0};    // futex of the sleeping workers
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<int> caller_cpu_{-1};

    alignas(64) Body body_ = nullptr;
    void* argument_ = nullptr;
    int64_t num_chunks_ = 0;
    int64_t chunks_per_unit_ = 1;

    std::vector<std::unique_ptr<Worker>> workers_;
    int started_for_ = 0;  // threads_ that workers_ were started for
    int64_t solo_until_ns_ = 0;
    int64_t solo_ns_ = 0;
    int helpful_phases_ = 0;
    int idle_phases_ = 0;
};

// The process's pool; after a fork the child's starts anew, with as many threads.
Pool& pool();

// Physical cores that this process may use: affinity mask, siblings counted once, and the control group's quota.
int usable_cores();

// Calls f(token) for each token, a few per chunk, or here where that is not worth a phase.
template <class F>
void each_token(Pool& pool, int64_t num_tokens, F&& f) {
    constexpr int64_t kFew = 8;
    const int64_t chunks = num_tokens < kFew ? 1 : (num_tokens + kFew - 1) / kFew;
    pool.run(chunks, [&](int64_t chunk, int) {
        for (int64_t t = num_tokens * chunk / chunks; t < num_tokens * (chunk + 1) / chunks; ++t) f(t);
    });
}

}  // namespace slip

extern "C" {
// Threads of all later phases, the caller's included. Returns 0, or an error code for n outside [1, 64].
int slip_set_threads(int n);
int slip_threads();
}
