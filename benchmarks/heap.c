/* The CPU allocator's peak without recording events: every aligned allocation of the process, counted as it happens.

   torch takes all CPU tensor memory by posix_memalign and gives it back by free. Preloaded before libc, these two keep
   the sum of what is alive and the most it has been. A sum becomes a candidate for the peak only at the next event, so
   that a block may first be said to be the host's (steppe_heap_host) and then never has counted. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { SLOTS = 1 << 20, LEAST = 64 }; /* open addressing; blocks alive at one time are far fewer */

static struct { uintptr_t at; int64_t bytes; } table[SLOTS];
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static int64_t alive, peak, events;

static size_t home_of(uintptr_t at) { return (size_t)((at >> 6) * UINT64_C(0x9E3779B97F4A7C15) >> 44); }

static size_t find(uintptr_t at) {
    size_t slot = home_of(at);
    while (table[slot].at != 0 && table[slot].at != at) slot = (slot + 1) % SLOTS;
    return slot;
}

static void settle(void) {
    if (alive > peak) peak = alive;
    events++;
}

static void forget(size_t hole) {
    /* Close the gap: whatever probed past it moves up, so that later look-ups need no tombstones. */
    table[hole].at = 0;
    for (size_t slot = (hole + 1) % SLOTS; table[slot].at != 0; slot = (slot + 1) % SLOTS) {
        size_t home = home_of(table[slot].at);
        if ((slot - home) % SLOTS >= (slot - hole) % SLOTS) {
            table[hole] = table[slot];
            table[slot].at = 0;
            hole = slot;
        }
    }
}

int posix_memalign(void **out, size_t alignment, size_t bytes) {
    void *block = __libc_memalign(alignment, bytes);
    if (block == NULL) return ENOMEM;
    *out = block;
    if (alignment < LEAST) return 0;
    pthread_mutex_lock(&guard);
    settle();
    size_t slot = find((uintptr_t)block);
    table[slot].at = (uintptr_t)block;
    table[slot].bytes = (int64_t)bytes;
    alive += (int64_t)bytes;
    pthread_mutex_unlock(&guard);
    return 0;
}

void free(void *block) {
    if (block != NULL && ((uintptr_t)block & (LEAST - 1)) == 0) {
        pthread_mutex_lock(&guard);
        size_t slot = find((uintptr_t)block);
        if (table[slot].at != 0) {
            settle();
            alive -= table[slot].bytes;
            forget(slot);
        }
        pthread_mutex_unlock(&guard);
    }
    __libc_free(block);
}

/* This block is host memory of an arena: it doesn't count, and its free doesn't either. */
void steppe_heap_host(void *block) {
    pthread_mutex_lock(&guard);
    size_t slot = find((uintptr_t)block);
    if (table[slot].at != 0) {
        alive -= table[slot].bytes;
        table[slot].bytes = 0;
    }
    pthread_mutex_unlock(&guard);
}

/* Start counting anew: what is alive now is the base. Returns it. */
int64_t steppe_heap_reset(void) {
    pthread_mutex_lock(&guard);
    peak = alive;
    int64_t base = alive;
    pthread_mutex_unlock(&guard);
    return base;
}

int64_t steppe_heap_peak(void) {
    pthread_mutex_lock(&guard);
    settle();
    int64_t value = peak;
    pthread_mutex_unlock(&guard);
    return value;
}
