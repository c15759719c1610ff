/* Jobs of chance from several callers at once: every chunk must be done, and once. `pool.c CALLERS JOBS`. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "threadpool.h"

enum { MOST = 700 };

typedef struct {
    int seen[MOST], busy;
} Job;

static int jobs;

static void do_chunk(void *job, int chunk) {
    Job *own = job;
    own->seen[chunk]++;
    for (volatile int n = 0; n < own->busy; n++) continue;
}

static void *call(void *number) {
    unsigned state = (unsigned)(intptr_t)number;
    static _Thread_local Job job;
    for (int n = 0; n < jobs; n++) {
        int chunks = rand_r(&state) % 40 ? 1 + rand_r(&state) % 24 : rand_r(&state) % MOST;
        memset(job.seen, 0, sizeof job.seen);
        job.busy = rand_r(&state) % 4 ? rand_r(&state) % 300 : 0;
        parallel_for(do_chunk, &job, chunks, 1 + rand_r(&state) % 5);
        for (int i = 0; i < MOST; i++)
            if (job.seen[i] != (i < chunks)) abort();
        if (rand_r(&state) % 1000 == 0) nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL); /* others sleep too */
    }
    return NULL;
}

int main(int count, char **words) {
    pthread_t threads[8];
    int callers = count == 3 ? atoi(words[1]) : 0;
    if (callers < 1 || callers > 8) return 2;
    jobs = atoi(words[2]);
    for (int n = 0; n < callers; n++)
        if (pthread_create(threads + n, NULL, call, (void *)(intptr_t)(n + 1))) return 2;
    for (int n = 0; n < callers; n++) pthread_join(threads[n], NULL);
    return 0;
}
