/* The only file that names memory orders.
 *
 * One process writes each shared field unless the field's comment says otherwise. Fields are plain integers in the structs,
 * because cffi must read the declarations; every access to a shared one uses these macros in C, and pyengine.native in
 * Python.
 */
#pragma once

/* Publish: what this process wrote before is visible to a process that acquires the value. */
#define ms_store_release(address, value) __atomic_store_n((address), (value), __ATOMIC_RELEASE)
/* Read a published value: afterwards what its writer wrote before is visible. */
#define ms_load_acquire(address) __atomic_load_n((address), __ATOMIC_ACQUIRE)
/* For a field that only this process writes, or a value that may be stale. */
#define ms_load_relaxed(address) __atomic_load_n((address), __ATOMIC_RELAXED)
#define ms_store_relaxed(address, value) __atomic_store_n((address), (value), __ATOMIC_RELAXED)
/* For a field that other processes read often and only this one writes: an unchanged value does not take their cache line. */
#define ms_store_changed(address, value)                  \
    do {                                                  \
        const __typeof__(*(address)) new_value = (value); \
        if (ms_load_relaxed(address) != new_value)        \
            ms_store_relaxed((address), new_value);       \
    } while (0)
/* Exchange a flag (latches), with full order on both sides. */
#define ms_exchange(address, value) __atomic_exchange_n((address), (value), __ATOMIC_SEQ_CST)
#define ms_add(address, value) __atomic_add_fetch((address), (value), __ATOMIC_SEQ_CST)
#define ms_compare_exchange(address, expected, value) \
    __atomic_compare_exchange_n((address), (expected), (value), 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)
/* Between a store and a later load of what another process stores, as for sleepers and wakers. */
#define ms_fence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
/* Between the loads of a pair and the check whether the pair was replaced meanwhile. */
#define ms_fence_acquire() __atomic_thread_fence(__ATOMIC_ACQUIRE)
/* Keep the compiler from reordering stores, for a process that reads them after this one was killed: executed stores are
 * visible, later ones are not. It needs no CPU fence, since a killed process has no store buffer. */
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
/* Fetch a cache line of another CPU before its use, for a load or for a store. Neither faults. */
#define ms_prefetch(address) __builtin_prefetch((address), 0)
#if defined(__x86_64__)
#define ms_prefetch_to_store(address) __asm__ __volatile__("prefetchw %0" : : "m"(*(const char *)(address)))
#else
#define ms_prefetch_to_store(address) __builtin_prefetch((address), 1)
#endif

#define MS_ENTRY_AHEAD_BYTES 384 /* a small message with its topic and properties, in a ring or in the log */

/* Prefetch the lines of memory[at, at + bytes) that begin below memory[memory_bytes]. */
static inline void ms_prefetch_range(const uint8_t *memory, uint64_t memory_bytes, uint64_t at, uint64_t bytes, int to_store)
{
    for (uint64_t end = at + bytes; at < end && at < memory_bytes; at += MS_CACHE_LINE_BYTES) {
        if (to_store)
            ms_prefetch_to_store(memory + at);
        else
            ms_prefetch(memory + at);
    }
}
