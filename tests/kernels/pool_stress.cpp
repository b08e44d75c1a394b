// Stress of csrc/pool.cpp: exits with 0, or prints what went wrong.
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "pool.h"

using slip::Pool;

static void expect(bool holds, const char* what) {
    if (!holds) {
        fprintf(stderr, "must hold: %s\n", what);
        _exit(1);
    }
}

// Each chunk exactly once, no two chunks of a thread at once, everything visible afterwards.
static void phase(Pool& pool, int64_t chunks, int work) {
    std::vector<int> done(chunks, 0);  // not atomic: the pool itself must order the accesses
    std::vector<int> inside(Pool::kMaxThreads, 0);
    std::atomic<bool> good{true};
    pool.run(chunks, [&](int64_t chunk, int thread) {
        if (chunk < 0 || chunk >= chunks || thread < 0 || thread >= pool.threads() || inside[thread]++) good = false;
        for (volatile int i = 0; i < work; i = i + 1) {
        }
        done[chunk]++;
        inside[thread]--;
    });
    for (int64_t chunk = 0; chunk < chunks; ++chunk) expect(done[chunk] == 1, "each chunk is done once");
    expect(good, "chunks and threads are in range, one chunk a thread");
}

static void phases(Pool& pool) {
    for (int64_t chunks : {0, 1, 2, 3, 7, 8, 16, 100, 1000}) {
        for (int i = 0; i < 200; ++i) phase(pool, chunks, i % 20 * 10);
    }
    for (int64_t chunks : {65534, 65535, 65536, 131071, 200000}) phase(pool, chunks, 0);
}

// Whether another thread than the caller takes a chunk, however long the system lets it wait.
static bool is_helped(Pool& pool) {
    const time_t until = time(nullptr) + 30;
    std::atomic<bool> helped{false};
    while (!helped && time(nullptr) < until) {
        pool.run(64, [&](int64_t, int thread) {
            for (volatile int i = 0; i < 20000; i = i + 1) {
            }
            if (thread != 0) helped = true;
        });
    }
    return helped;
}

int main() {
    Pool& pool = slip::pool();
    expect(pool.threads() == slip::usable_cores(), "the pool takes the usable cores");
    for (int threads : {1, 2, 3, 7, 2}) {
        expect(slip_set_threads(threads) == 0 && slip_threads() == threads, "threads can be set");
        phases(pool);
    }
    expect(slip_set_threads(0) != 0 && slip_set_threads(65) != 0 && slip_threads() == 2, "bad numbers of threads are refused");

    // A call from inside a chunk runs in place.
    std::atomic<int> inner{0};
    pool.run(10, [&](int64_t, int outer) { pool.run(10, [&](int64_t, int thread) { inner += thread == outer; }); });
    expect(inner == 100, "nested phases run on the thread that they are called from");

    expect(is_helped(pool), "workers help");
    slip_set_threads(1);
    phase(pool, 10, 0);
    slip_set_threads(2);
    expect(is_helped(pool), "workers help again");

    // Two callers take turns.
    std::vector<std::thread> callers;
    for (int i = 0; i < 2; ++i) callers.emplace_back([&] { phases(pool); });
    for (auto& caller : callers) caller.join();

    // Sleeping workers are woken, and phases after a pause are whole.
    for (int i = 0; i < 50; ++i) {
        usleep(1000);
        phase(pool, 64, 100);
    }

    // A child has workers of its own.
    const pid_t child = fork();
    if (child == 0) {
        expect(slip_threads() == 2, "a child has as many threads");
        expect(is_helped(pool), "a child's workers help it");
        phases(pool);
        _exit(0);
    }
    int status = 1;
    expect(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "the pool works in a child");
    phases(pool);

    // The caller's floating point state: denormals are flushed inside alone.
    volatile float tiny = 1e-40f;
    std::atomic<int> kept{0};
    pool.run(64, [&](int64_t, int) { kept += tiny * 1.0f != 0; });
    expect(kept == 0, "denormals are flushed in chunks");
    expect(tiny * 1.0f != 0, "the caller's denormals are kept");
    puts("ok");
}
