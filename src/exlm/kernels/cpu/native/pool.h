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

typedef void (*Work)(void *job, int chunk);

enum { MOST_WORKERS = 255, MOST_CHUNKS = 65535, SPINS = 5000, PATIENCE = 2000 };

/* What a thread has to do. Two lines of the cache, so that nobody else's writes are in its way. */
typedef struct {
    _Atomic uint32_t rest; /* the next chunk and the one behind the last, 16 bits each */
    Work work;
    void *job;
} __attribute__((aligned(128))) Seat;

static struct {
    Seat seats[MOST_WORKERS + 1];   /* the caller's is the first */
    _Atomic int done __attribute__((aligned(128))); /* chunks */
    _Atomic int seated __attribute__((aligned(128))); /* threads of the job */
    _Atomic int sleepers;
    pthread_mutex_t busy;           /* held by the caller whose job runs */
    pthread_mutex_t door;           /* guards sleeping and waking */
    pthread_cond_t bell;
    int workers, watched;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .door = PTHREAD_MUTEX_INITIALIZER, .bell = PTHREAD_COND_INITIALIZER};

static void breathe(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int left(uint32_t rest) { return (int)(rest & 0xffff) - (int)(rest >> 16); }

/* Take a seat's next chunk, or with `others` a part of the last ones, and do it; answers how many. The seat's job is
   read only after a chunk of it is ours: it cannot end before that chunk has, so it holds. */
static int do_some(Seat *seat, int others) {
    uint32_t seen = atomic_load(&seat->rest);
    while (left(seen) > 0) {
        uint32_t count = others ? (left(seen) + 3) / 4 : 1, first = others ? (seen & 0xffff) - count : seen >> 16;
        if (!atomic_compare_exchange_weak(&seat->rest, &seen, others ? seen - count : seen + (1 << 16))) continue;
        for (uint32_t chunk = first; chunk < first + count; chunk++) seat->work(seat->job, (int)chunk);
        return (int)count;
    }
    return 0;
}

/* Work until nobody has any left. What was its own is reported first: others may be waiting for that alone. */
static void serve(int own) {
    int all = 0, some = 1, seated = atomic_load(&pool.seated);
    while ((some = do_some(pool.seats + own, 0))) all += some;
    if (all) atomic_fetch_add(&pool.done, all);
    for (int n = 1; n < seated; n++)
        while ((some = do_some(pool.seats + (own + n) % seated, 1))) atomic_fetch_add(&pool.done, some);
}

static void *attend_pool(void *number) {
    int own = (int)(intptr_t)number;
    Seat *seat = pool.seats + own;
    for (;;) {
        for (int spin = 0; spin < SPINS; spin++) {
            if (left(atomic_load(&seat->rest)) > 0) {
                serve(own);
                spin = 0;
            }
            breathe();
        }
        pthread_mutex_lock(&pool.door);
        atomic_fetch_add(&pool.sleepers, 1);
        if (left(atomic_load(&seat->rest)) <= 0) pthread_cond_wait(&pool.bell, &pool.door);
        atomic_fetch_sub(&pool.sleepers, 1);
        pthread_mutex_unlock(&pool.door);
        if (own < atomic_load(&pool.seated)) serve(own); /* its own may be gone while others have much */
    }
    return NULL;
}

/* A forked child has none of its parent's threads, and nothing of the job that may have been running. */
static void start_anew(void) {
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.door, NULL);
    pthread_cond_init(&pool.bell, NULL);
    atomic_store(&pool.sleepers, 0);
    for (int n = 0; n <= MOST_WORKERS; n++) atomic_store(&pool.seats[n].rest, 0);
    pool.workers = 0;
}

static void hire(int workers) {
    if (!pool.watched) pool.watched = pthread_atfork(NULL, NULL, start_anew) == 0;
    while (pool.workers < workers && pool.workers < MOST_WORKERS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, attend_pool, (void *)(intptr_t)(pool.workers + 1))) return;
        pthread_detach(thread);
        pool.workers++;
    }
}

/* Everybody's share of a job. */
static void seat_all(Work work, void *job, int chunks, int threads) {
    atomic_store(&pool.done, 0);
    atomic_store(&pool.seated, threads);
    for (int n = threads - 1; n >= 0; n--) {
        uint32_t first = (uint32_t)(n * chunks + threads - 1) / threads;
        uint32_t last = (uint32_t)((n + 1) * chunks + threads - 1) / threads;
        pool.seats[n].work = work, pool.seats[n].job = job;
        atomic_store(&pool.seats[n].rest, first << 16 | last);
    }
}

/* Do work(job, 0 … chunks - 1), the caller and up to threads - 1 others. */
static void share(Work work, void *job, int chunks, int threads) {
    if (threads < 2 || chunks < 2 || chunks > MOST_CHUNKS || pthread_mutex_trylock(&pool.busy)) {
        for (int chunk = 0; chunk < chunks; chunk++) work(job, chunk);
        return;
    }
    if (pool.workers < threads - 1) hire(threads - 1);
    if (threads > pool.workers + 1) threads = pool.workers + 1;
    seat_all(work, job, chunks, threads);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.door);
        pthread_cond_broadcast(&pool.bell);
        pthread_mutex_unlock(&pool.door);
    }
    serve(0);
    for (int spin = 0; atomic_load(&pool.done) < chunks; spin++) {
        if (spin < PATIENCE) breathe();
        else sched_yield();
    }
    pthread_mutex_unlock(&pool.busy);
}

#endif
