/* The only file that names memory orders.
 *
 * Shared memory is written by one process per field unless the field's own
 * comment says otherwise. Fields are plain integers in the structs (cffi must be
 * able to read the declarations); every access to a shared one goes through
 * these, in C, and from Python through pyengine.native.
 */
#ifndef MS_ATOMICS_H
#define MS_ATOMICS_H

#include <stdint.h>

/* Publish: everything this process wrote before is visible to who acquires it. */
#define ms_store_release(address, value) __atomic_store_n((address), (value), __ATOMIC_RELEASE)
/* Read a published value: what its writer wrote before it is visible afterwards. */
#define ms_load_acquire(address) __atomic_load_n((address), __ATOMIC_ACQUIRE)
/* The own field of this process, or a value whose staleness does no harm. */
#define ms_load_relaxed(address) __atomic_load_n((address), __ATOMIC_RELAXED)
#define ms_store_relaxed(address, value) __atomic_store_n((address), (value), __ATOMIC_RELAXED)
/* Take and leave a flag in one step (latches); full order on both sides. */
#define ms_exchange(address, value) __atomic_exchange_n((address), (value), __ATOMIC_SEQ_CST)
#define ms_add(address, value) __atomic_add_fetch((address), (value), __ATOMIC_SEQ_CST)
#define ms_compare_exchange(address, expected, value) \
    __atomic_compare_exchange_n((address), (expected), (value), 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)
/* Between "I stored mine" and "I look at yours" (sleep or ring the bell). */
#define ms_fence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
/* Between the loads of a pair and the look whether the pair was replaced meanwhile. */
#define ms_fence_acquire() __atomic_thread_fence(__ATOMIC_ACQUIRE)
/* Keep the order of stores as written, for the process that looks after this one was killed: the stores that it had
 * executed are there, later ones are not. No CPU fence is needed: a killed process has no store buffer. */
#define ms_compiler_fence() __atomic_signal_fence(__ATOMIC_SEQ_CST)

/* Inside a spin: let the other hyper-thread run. */
#if defined(__x86_64__) || defined(__i386__)
#define ms_pause() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define ms_pause() __asm__ __volatile__("yield")
#else
#define ms_pause() ((void)0)
#endif

#define MS_CACHE_LINE_BYTES 64
/* Fetch a line of another CPU ahead of its use: to read it, or to own it before it is stored to. Neither faults. */
#define ms_prefetch(address) __builtin_prefetch((address), 0)
#if defined(__x86_64__)
#define ms_prefetch_to_store(address) __asm__ __volatile__("prefetchw %0" : : "m"(*(const char *)(address)))
#else
#define ms_prefetch_to_store(address) __builtin_prefetch((address), 1)
#endif

#define MS_ENTRY_AHEAD_BYTES 384 /* a small message with its topic and properties, in a ring or in the log */

/* Fetch ahead the lines of memory[at, at + bytes) that begin below memory[memory_bytes]. */
static inline void ms_prefetch_range(const uint8_t *memory, uint64_t memory_bytes, uint64_t at, uint64_t bytes, int to_store)
{
    for (uint64_t end = at + bytes; at < end && at < memory_bytes; at += MS_CACHE_LINE_BYTES) {
        if (to_store)
            ms_prefetch_to_store(memory + at);
        else
            ms_prefetch(memory + at);
    }
}

#endif
