/* Threads that wait for work for a moment, then sleep.

   A job is a number of chunks. Each thread, the caller too, has a stretch of them of its own, the same one in every
   job of as many chunks: what it reads lies side by side, and some of it is still in its cache the next time. Whoever
   has done its own takes of what another has left, so a thread that the system has put aside delays nobody for
   long; who computes a chunk changes nothing about its result. Only one job runs at a time: a caller that finds the
   pool busy does its work alone. */

#ifndef EXLM_POOL_H
#define EXLM_POOL_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

typedef void (*ChunkFunction)(void *job, int chunk);

enum { MAX_WORKERS = 255, MAX_CHUNKS = 65535, SPINS = 5000, SPINS_BEFORE_YIELD = 2000 };

/* What a thread has to do. Two lines of the cache, so that nobody else's writes are in its way. */
typedef struct {
    _Atomic uint32_t remaining_range; /* the next chunk and the one behind the last, 16 bits each */
    ChunkFunction work;
    void *job;
} __attribute__((aligned(128))) WorkQueue;

static struct {
    WorkQueue queues[MAX_WORKERS + 1];   /* the caller's is the first */
    _Atomic int chunks_done __attribute__((aligned(128))); /* chunks */
    _Atomic int active __attribute__((aligned(128))); /* threads of the job */
    _Atomic int sleepers;
    pthread_mutex_t job_mutex;           /* held by the caller whose job runs */
    pthread_mutex_t sleep_mutex;           /* guards sleeping and waking */
    pthread_cond_t wake;
    int workers, atfork_registered;
} pool = {.job_mutex = PTHREAD_MUTEX_INITIALIZER, .sleep_mutex = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int remaining(uint32_t remaining_range) { return (int)(remaining_range & 0xffff) - (int)(remaining_range >> 16); }

/* Take a seat's next chunk, or with `others` a part of the last ones, and do it; answers how many. The seat's job is
   read only after a chunk of it is ours: it cannot end before that chunk has, so it holds. */
static int run_some(WorkQueue *queue, int steal) {
    uint32_t range = atomic_load(&queue->remaining_range);
    while (remaining(range) > 0) {
        uint32_t count = steal ? (remaining(range) + 3) / 4 : 1, first = steal ? (range & 0xffff) - count : range >> 16;
        if (!atomic_compare_exchange_weak(&queue->remaining_range, &range, steal ? range - count : range + (1 << 16))) continue;
        for (uint32_t chunk = first; chunk < first + count; chunk++) queue->work(queue->job, (int)chunk);
        return (int)count;
    }
    return 0;
}

/* Work until nobody has any left. What was its own is reported first: others may be waiting for that alone. */
static void run_chunks(int own) {
    int all = 0, count = 1, active = atomic_load(&pool.active);
    while ((count = run_some(pool.queues + own, 0))) all += count;
    if (all) atomic_fetch_add(&pool.chunks_done, all);
    for (int n = 1; n < active; n++)
        while ((count = run_some(pool.queues + (own + n) % active, 1))) atomic_fetch_add(&pool.chunks_done, count);
}

static void *worker_main(void *number) {
    int own = (int)(intptr_t)number;
    WorkQueue *queue = pool.queues + own;
    for (;;) {
        for (int spin = 0; spin < SPINS; spin++) {
            if (remaining(atomic_load(&queue->remaining_range)) > 0) {
                run_chunks(own);
                spin = 0;
            }
            cpu_relax();
        }
        pthread_mutex_lock(&pool.sleep_mutex);
        atomic_fetch_add(&pool.sleepers, 1);
        if (remaining(atomic_load(&queue->remaining_range)) <= 0) pthread_cond_wait(&pool.wake, &pool.sleep_mutex);
        atomic_fetch_sub(&pool.sleepers, 1);
        pthread_mutex_unlock(&pool.sleep_mutex);
        if (own < atomic_load(&pool.active)) run_chunks(own); /* its own may be gone while others have much */
    }
    return NULL;
}

/* A forked child has none of its parent's threads, and nothing of the job that may have been running. */
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

/* Everybody's share of a job. */
static void assign_chunks(ChunkFunction work, void *job, int chunks, int threads) {
    atomic_store(&pool.chunks_done, 0);
    atomic_store(&pool.active, threads);
    for (int n = threads - 1; n >= 0; n--) {
        uint32_t first = (uint32_t)(n * chunks + threads - 1) / threads;
        uint32_t last = (uint32_t)((n + 1) * chunks + threads - 1) / threads;
        pool.queues[n].work = work, pool.queues[n].job = job;
        atomic_store(&pool.queues[n].remaining_range, first << 16 | last);
    }
}

/* Do work(job, 0 … chunks - 1), the caller and up to threads - 1 others. */
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
        if (spin < SPINS_BEFORE_YIELD) cpu_relax();
        else sched_yield();
    }
    pthread_mutex_unlock(&pool.job_mutex);
}

#endif
