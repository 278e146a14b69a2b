/* Sleeps on a 32-bit number in shared memory, which other processes wake. Waiters may map the page read-only. Waits are
 * always timed. */
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>

#define MS_FUTEX_ALL 0xffffffffu

static inline int64_t ms_monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline int64_t ms_earlier(int64_t a_ns, int64_t b_ns)
{
    return a_ns < b_ns ? a_ns : b_ns;
}

/* Sleep until a wake-up for one of `bits`: 0, or -EAGAIN *address is not `seen`, -ETIMEDOUT, -EINTR a signal. */
static inline int ms_futex_wait_for(const uint32_t *address, uint32_t seen, uint32_t bits, int64_t timeout_ns)
{
    int64_t until_ns = ms_monotonic_ns() + timeout_ns;
    struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
    return syscall(SYS_futex, address, FUTEX_WAIT_BITSET, seen, &until, NULL, bits) == 0 ? 0 : -errno;
}

static inline int ms_futex_wait(const uint32_t *address, uint32_t seen, int64_t timeout_ns)
{
    return ms_futex_wait_for(address, seen, MS_FUTEX_ALL, timeout_ns);
}

/* Wake the processes that sleep for one of `bits`, and return how many there were. */
static inline long ms_futex_wake(const uint32_t *address, uint32_t bits)
{
    return syscall(SYS_futex, address, FUTEX_WAKE_BITSET, 0x7fffffff, NULL, NULL, bits);
}

static inline long ms_futex_wake_all(const uint32_t *address)
{
    return ms_futex_wake(address, MS_FUTEX_ALL);
}

static inline int64_t ms_wall_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}
