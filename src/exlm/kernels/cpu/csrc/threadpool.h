/* Threads that spin for work for a moment, then sleep.

   A job is a number of chunks. Each thread, the caller included, owns a range of them, the same range for every job
   with this number of chunks: what it reads is contiguous, and part of it is still in its cache the next time. A thread
   that is done steals from the others' ranges, so one that the system has descheduled delays a job little. Which thread
   computes a chunk never changes the result. One job runs at a time: a caller that finds the pool busy works alone. */

#ifndef EXLM_THREADPOOL_H
#define EXLM_THREADPOOL_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

typedef void (*ChunkFunction)(void *job, int chunk);

enum { MAX_WORKERS = 255, MAX_CHUNKS = 65535, SPINS = 5000, SPINS_BEFORE_YIELD = 2000 };

/* A thread's chunks. Aligned to two cache lines (they are fetched in pairs), so that queues share none. */
typedef struct {
    _Atomic uint32_t remaining_range; /* upper half: the next chunk; lower half: the one after the last */
    ChunkFunction work;
    void *job;
} __attribute__((aligned(128))) WorkQueue;

static struct {
    WorkQueue queues[MAX_WORKERS + 1]; /* the caller's is the first */
    _Atomic int chunks_done __attribute__((aligned(128)));
    _Atomic int active __attribute__((aligned(128))); /* threads of the job */
    _Atomic int sleepers;
    pthread_mutex_t job_mutex;   /* held by the caller whose job runs */
    pthread_mutex_t sleep_mutex; /* guards sleepers and wake */
    pthread_cond_t wake;
    int workers, atfork_registered;
} pool = {
    .job_mutex = PTHREAD_MUTEX_INITIALIZER,
    .sleep_mutex = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
};

static void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int remaining(uint32_t range) { return (int)(range & 0xffff) - (int)(range >> 16); }

/* Runs the queue's next chunk, or steals a quarter of the remaining ones from its end; returns how many it ran. The
   queue's job is read only after a chunk of it is taken: it cannot end before that chunk has run, so it stays valid. */
static int run_next(WorkQueue *queue, int steal) {
    uint32_t range = atomic_load(&queue->remaining_range);
    while (remaining(range) > 0) {
        uint32_t count = steal ? (remaining(range) + 3) / 4 : 1;
        uint32_t first = steal ? (range & 0xffff) - count : range >> 16;
        uint32_t rest = steal ? range - count : range + (1 << 16);
        if (!atomic_compare_exchange_weak(&queue->remaining_range, &range, rest)) continue;
        for (uint32_t chunk = first; chunk < first + count; chunk++) queue->work(queue->job, (int)chunk);
        return (int)count;
    }
    return 0;
}

/* Runs the thread's own chunks, reports them together (the caller may wait for nothing else), then steals. */
static void run_chunks(int thread) {
    int ran = 0, count = 1, active = atomic_load(&pool.active);
    while ((count = run_next(pool.queues + thread, 0))) ran += count;
    if (ran) atomic_fetch_add(&pool.chunks_done, ran);
    for (int n = 1; n < active; n++)
        while ((count = run_next(pool.queues + (thread + n) % active, 1))) atomic_fetch_add(&pool.chunks_done, count);
}

static void *worker_main(void *number) {
    int thread = (int)(intptr_t)number;
    WorkQueue *queue = pool.queues + thread;
    for (;;) {
        for (int spin = 0; spin < SPINS; spin++) {
            if (remaining(atomic_load(&queue->remaining_range)) > 0) {
                run_chunks(thread);
                spin = 0;
            }
            cpu_relax();
        }
        pthread_mutex_lock(&pool.sleep_mutex);
        atomic_fetch_add(&pool.sleepers, 1);
        if (remaining(atomic_load(&queue->remaining_range)) <= 0) pthread_cond_wait(&pool.wake, &pool.sleep_mutex);
        atomic_fetch_sub(&pool.sleepers, 1);
        pthread_mutex_unlock(&pool.sleep_mutex);
        if (thread < atomic_load(&pool.active)) run_chunks(thread); /* even if its own chunks have been stolen */
    }
    return NULL;
}

/* A forked child has none of its parent's threads, and nothing of a job that was running. */
static void reset_after_fork(void) {
    pthread_mutex_init(&pool.job_mutex, NULL);
    pthread_mutex_init(&pool.sleep_mutex, NULL);
    pthread_cond_init(&pool.wake, NULL);
    atomic_store(&pool.sleepers, 0);
    for (int n = 0; n <= MAX_WORKERS; n++) atomic_store(&pool.queues[n].remaining_range, 0);
    pool.workers = 0;
}

static void start_workers(int workers) {
    if (!pool.atfork_registered) pool.atfork_registered = pthread_atfork(NULL, NULL, reset_after_fork) == 0;
    while (pool.workers < workers && pool.workers < MAX_WORKERS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker_main, (void *)(intptr_t)(pool.workers + 1))) return;
        pthread_detach(thread);
        pool.workers++;
    }
}

static void assign_chunks(ChunkFunction work, void *job, int chunks, int threads) {
    atomic_store(&pool.chunks_done, 0);
    atomic_store(&pool.active, threads);
    for (int n = threads - 1; n >= 0; n--) {
        uint32_t first = (uint32_t)(n * chunks + threads - 1) / threads;
        uint32_t last = (uint32_t)((n + 1) * chunks + threads - 1) / threads;
        pool.queues[n].work = work;
        pool.queues[n].job = job;
        atomic_store(&pool.queues[n].remaining_range, first << 16 | last);
    }
}

/* Calls work(job, chunk) for each chunk, on the caller and up to threads - 1 workers; returns when all are done. */
static void parallel_for(ChunkFunction work, void *job, int chunks, int threads) {
    if (threads < 2 || chunks < 2 || chunks > MAX_CHUNKS || pthread_mutex_trylock(&pool.job_mutex)) {
        for (int chunk = 0; chunk < chunks; chunk++) work(job, chunk);
        return;
    }
    if (pool.workers < threads - 1) start_workers(threads - 1);
    if (threads > pool.workers + 1) threads = pool.workers + 1;
    assign_chunks(work, job, chunks, threads);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.sleep_mutex);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep_mutex);
    }
    run_chunks(0);
    for (int spin = 0; atomic_load(&pool.chunks_done) < chunks; spin++) {
        if (spin < SPINS_BEFORE_YIELD)
            cpu_relax();
        else
            sched_yield();
    }
    pthread_mutex_unlock(&pool.job_mutex);
}

#endif
