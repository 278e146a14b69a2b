/* Sleeping on a 32-bit number in shared memory (not private: other processes wake).
 * Waiters may have the page mapped read-only. Waits are always timed. */
#ifndef MS_FUTEX_H
#define MS_FUTEX_H

#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline void ms_futex_wait(const uint32_t *address, uint32_t seen, int64_t timeout_ns)
{
    struct timespec timeout = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    syscall(SYS_futex, address, FUTEX_WAIT, seen, &timeout, NULL, 0);
}

static inline void ms_futex_wake_all(const uint32_t *address)
{
    syscall(SYS_futex, address, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
}

static inline int64_t ms_monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline int64_t ms_wall_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

#endif
