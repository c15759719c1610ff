/* Threads that wait for work for a moment, then sleep.

   A job is a number of chunks. Whoever is free takes the next one, the caller too, so a thread that the
   system has put aside delays nobody; who computes a chunk changes nothing about its result. Only one job
   runs at a time: a caller that finds the pool busy does its work alone. */

#ifndef EXLM_POOL_H
#define EXLM_POOL_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

typedef void (*Work)(void *job, int chunk);

enum { MOST_WORKERS = 255, MOST_CHUNKS = 65535, SPINS = 5000, PATIENCE = 2000, SHARES = 2 };

static struct {
    pthread_mutex_t busy;           /* held by the caller whose job runs */
    pthread_mutex_t door;           /* guards sleeping and waking */
    pthread_cond_t bell;
    _Atomic uint64_t ticket;        /* job number, chunks and the next chunk: 32, 16 and 16 bits */
    _Atomic int done, sleepers, wanted;
    Work work;
    void *job;
    int workers, watched;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .door = PTHREAD_MUTEX_INITIALIZER, .bell = PTHREAD_COND_INITIALIZER};

static void breathe(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int left(uint64_t ticket) { return (int)(ticket & 0xffff) < (int)(ticket >> 16 & 0xffff); }

/* Take chunks until there are none, many at a time and ever fewer: neighbours lie side by side in memory, taking
   costs as much as a small one, and nobody should wait long for the last. The job's fields are read only after a
   chunk of it is ours: it cannot end before that chunk has, so they hold. */
static void serve(void) {
    uint64_t seen = atomic_load(&pool.ticket);
    while (left(seen)) {
        int first = (int)(seen & 0xffff), chunks = (int)(seen >> 16 & 0xffff);
        int shares = SHARES * (atomic_load(&pool.wanted) + 1), next = first + (chunks - first + shares - 1) / shares;
        if (atomic_compare_exchange_weak(&pool.ticket, &seen, seen + (uint64_t)(next - first))) {
            for (int chunk = first; chunk < next; chunk++) pool.work(pool.job, chunk);
            atomic_fetch_add(&pool.done, next - first);
            seen = atomic_load(&pool.ticket);
        }
    }
}

static void *attend_pool(void *number) {
    int own = (int)(intptr_t)number;
    for (;;) {
        for (int spin = 0; spin < SPINS; spin++) {
            if (left(atomic_load(&pool.ticket)) && own < atomic_load(&pool.wanted)) {
                serve();
                spin = 0;
            }
            breathe();
        }
        pthread_mutex_lock(&pool.door);
        atomic_fetch_add(&pool.sleepers, 1);
        if (!left(atomic_load(&pool.ticket)) || own >= atomic_load(&pool.wanted))
            pthread_cond_wait(&pool.bell, &pool.door);
        atomic_fetch_sub(&pool.sleepers, 1);
        pthread_mutex_unlock(&pool.door);
    }
    return NULL;
}

/* A forked child has none of its parent's threads. */
static void start_anew(void) {
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.door, NULL);
    pthread_cond_init(&pool.bell, NULL);
    atomic_store(&pool.sleepers, 0);
    pool.workers = 0;
}

static void hire(int workers) {
    if (!pool.watched) pool.watched = pthread_atfork(NULL, NULL, start_anew) == 0;
    while (pool.workers < workers && pool.workers < MOST_WORKERS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, attend_pool, (void *)(intptr_t)pool.workers)) return;
        pthread_detach(thread);
        pool.workers++;
    }
}

/* Do work(job, 0 … chunks - 1), the caller and up to threads - 1 others. */
static void share(Work work, void *job, int chunks, int threads) {
    if (threads < 2 || chunks < 2 || chunks > MOST_CHUNKS || pthread_mutex_trylock(&pool.busy)) {
        for (int chunk = 0; chunk < chunks; chunk++) work(job, chunk);
        return;
    }
    if (pool.workers < threads - 1) hire(threads - 1);
    pool.work = work;
    pool.job = job;
    atomic_store(&pool.done, 0);
    atomic_store(&pool.wanted, threads - 1);
    uint64_t number = (atomic_load(&pool.ticket) >> 32) + 1;
    atomic_store(&pool.ticket, number << 32 | (uint64_t)chunks << 16);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.door);
        pthread_cond_broadcast(&pool.bell);
        pthread_mutex_unlock(&pool.door);
    }
    serve();
    for (int spin = 0; atomic_load(&pool.done) < chunks; spin++) {
        if (spin < PATIENCE) breathe();
        else sched_yield();
    }
    pthread_mutex_unlock(&pool.busy);
}

#endif
