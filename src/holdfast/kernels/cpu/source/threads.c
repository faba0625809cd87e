/* A small thread pool over numbered work items.
 *
 * The caller works too and waits only for items that a helper has begun: a helper that is asleep or descheduled
 * delays nothing, and after a fork the caller works alone. One caller uses the pool at a time; a second caller
 * meanwhile works without it. */

#define _GNU_SOURCE
#include "holdfast_cpu.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#else
#define RELAX() atomic_signal_fence(memory_order_seq_cst)
#endif

enum { THREADS_MAX = 64, SPINS = 1500, SPINS_OF_CALLER = 4000, COUNT_BITS = 20 };

/* The current work: generation, number of items, next item. One atomic word, so that a thread that takes an
 * item knows that it belongs to the current generation. */
static _Atomic uint64_t ticket;
static _Atomic int finished;
static void (*current_work)(void *, int);
static void *current_context;

static pthread_mutex_t callers = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t sleeping = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static _Atomic int sleepers;
static int helpers;
static _Atomic int helpers_allowed;

#define NEXT(word) ((int)((word) & ((1u << COUNT_BITS) - 1)))
#define COUNT(word) ((int)(((word) >> COUNT_BITS) & ((1u << COUNT_BITS) - 1)))

/* Take and run items until none is left. */
static void take_pieces(void) {
    for (;;) {
        uint64_t seen = atomic_load_explicit(&ticket, memory_order_acquire);
        if (NEXT(seen) >= COUNT(seen)) return;
        uint64_t mine = atomic_fetch_add_explicit(&ticket, 1, memory_order_acq_rel);
        if (NEXT(mine) >= COUNT(mine)) return;
        /* This piece is not finished, so the work that it belongs to is still the current one. */
        current_work(current_context, NEXT(mine));
        atomic_fetch_add_explicit(&finished, 1, memory_order_release);
    }
}

static int something_to_do(void) {
    uint64_t seen = atomic_load_explicit(&ticket, memory_order_acquire);
    return NEXT(seen) < COUNT(seen);
}

static void *helper(void *argument) {
    int number = (int)(intptr_t)argument;
    for (;;) {
        int allowed = number < atomic_load_explicit(&helpers_allowed, memory_order_relaxed);
        for (int spin = 0; allowed && spin < SPINS && !something_to_do(); spin++) RELAX();
        if (!allowed || !something_to_do()) {
            pthread_mutex_lock(&sleeping);
            atomic_fetch_add(&sleepers, 1);
            if (!allowed || !something_to_do()) pthread_cond_wait(&wake, &sleeping);
            atomic_fetch_sub(&sleepers, 1);
            pthread_mutex_unlock(&sleeping);
        }
        if (number < atomic_load_explicit(&helpers_allowed, memory_order_relaxed)) take_pieces();
    }
    return NULL;
}

/* Sets the number of threads, the caller included; returns the actual number. */
int hf_threads(int wanted) {
    pthread_mutex_lock(&callers);
    if (wanted > THREADS_MAX) wanted = THREADS_MAX;
    while (helpers < wanted - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, helper, (void *)(intptr_t)helpers) != 0) break;
        pthread_detach(thread);
        helpers++;
    }
    int used = wanted - 1 < helpers ? wanted - 1 : helpers;
    if (wanted > 0) atomic_store(&helpers_allowed, used);
    pthread_mutex_unlock(&callers);
    return atomic_load(&helpers_allowed) + 1;
}

/* Does pieces 0 to count - 1, each once, in any order; returns when all are done. */
void parallel(void (*work)(void *context, int index), void *context, int count) {
    int helped = atomic_load_explicit(&helpers_allowed, memory_order_relaxed) > 0;
    if (count < 2 || !helped || count >= 1 << COUNT_BITS || pthread_mutex_trylock(&callers) != 0) {
        for (int index = 0; index < count; index++) work(context, index);
        return;
    }
    current_work = work;
    current_context = context;
    atomic_store_explicit(&finished, 0, memory_order_relaxed);
    uint64_t generation = (atomic_load_explicit(&ticket, memory_order_relaxed) >> (2 * COUNT_BITS)) + 1;
    atomic_store_explicit(&ticket, generation << (2 * COUNT_BITS) | (uint64_t)count << COUNT_BITS,
                          memory_order_seq_cst);
    if (atomic_load_explicit(&sleepers, memory_order_seq_cst) > 0) {
        pthread_mutex_lock(&sleeping);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&sleeping);
    }
    take_pieces();
    for (int spin = 0; atomic_load_explicit(&finished, memory_order_acquire) < count; spin++) {
        if (spin < SPINS_OF_CALLER) RELAX();
        else sched_yield();
    }
    pthread_mutex_unlock(&callers);
}
