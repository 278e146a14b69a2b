#include "base.h"
#include "arrivals.h"

#include "consume_queue.h"

#define STIR_TRIES 1000
#define STIR_NAP_NS 20000

uint32_t ms_arrivals_slot(const uint8_t *topic, int32_t topic_bytes, int32_t queue_id)
{
    const uint64_t hash = ms_queue_hash(topic, topic_bytes, 0);
    return (uint32_t)(hash & 31) * 32 + (uint32_t)(((hash >> 8) + (uint64_t)queue_id) & 31);
}

int64_t ms_arrivals_limit(const struct ms_control *control, const struct ms_position *level)
{
    const int64_t reput_from = ms_load_acquire(&control->reput_from.value);
    const int64_t readable = ms_load_acquire(&level->value);
    int64_t limit = readable < reput_from ? readable : reput_from;
    if (control->identity.dispatch_at != 0) { /* an orderly stop dispatches beyond `confirm` */
        const int64_t confirm = ms_load_acquire(&control->confirm.value);
        limit = confirm < limit ? confirm : limit;
    }
    return limit;
}

int ms_arrivals_has(const struct ms_control *control, const struct ms_position *level, int64_t looked_end, uint32_t slot)
{
    /* The limit first: the ends of all messages below it were noted before it moved. */
    return ms_arrivals_limit(control, level) > looked_end && ms_load_relaxed(&control->arrivals.end[slot]) > looked_end;
}

void ms_arrivals_sleep_for(struct ms_sleeper *sleeper, const struct ms_control *control, uint32_t bits, uint32_t seen)
{
    ms_store_relaxed(&sleeper->control, control); /* a thread that ends the sleep before may read what is of this one */
    ms_store_relaxed(&sleeper->bits, bits != 0 ? bits : 1); /* without a queue only a stir ends it */
    ms_store_release(&sleeper->seen, seen);
}

int ms_arrivals_sleep(struct ms_sleeper *sleeper, uint32_t seen, uint32_t arrivals, int64_t timeout_ns)
{
    ms_exchange(&sleeper->is_asleep, 1); /* before the look at `stirs`, as ms_arrivals_stir does it the other way round */
    const int is_stirred = ms_load_acquire(&sleeper->stirs) != seen;
    const int ended = is_stirred ? 0 : ms_futex_wait_for(&sleeper->control->arrival_seq.value, arrivals, sleeper->bits, timeout_ns);
    ms_store_release(&sleeper->is_asleep, 0);
    if (is_stirred)
        return MS_ARRIVALS_STIRRED;
    return ended == -EINTR ? MS_ARRIVALS_SIGNAL : MS_ARRIVALS_ARRIVED;
}

int ms_arrivals_wait(const struct ms_control *control, struct ms_sleeper *sleeper, uint32_t seen,
                     const struct ms_awaited *queues, uint32_t count, int64_t timeout_ns)
{
    const int64_t until_ns = ms_monotonic_ns() + timeout_ns;
    uint32_t bits = 0;
    for (uint32_t i = 0; i < count; i++)
        bits |= ms_arrivals_bit(queues[i].slot);
    ms_arrivals_sleep_for(sleeper, control, bits, seen);
    for (;;) {
        const uint32_t arrivals = ms_load_acquire(&control->arrival_seq.value);
        for (uint32_t i = 0; i < count; i++)
            if (ms_arrivals_has(control, queues[i].level, queues[i].looked_end, queues[i].slot))
                return MS_ARRIVALS_ARRIVED;
        const int64_t left_ns = until_ns - ms_monotonic_ns();
        if (left_ns <= 0)
            return MS_ARRIVALS_SIGNAL;
        const int slept = ms_arrivals_sleep(sleeper, seen, arrivals, left_ns < MS_ARRIVALS_SLEEP_NS ? left_ns : MS_ARRIVALS_SLEEP_NS);
        if (slept != MS_ARRIVALS_ARRIVED)
            return slept;
    }
}

void ms_arrivals_stir(struct ms_sleeper *sleeper)
{
    const struct timespec nap = {.tv_nsec = STIR_NAP_NS};
    const uint32_t wanted = ms_add(&sleeper->stirs, 1);
    /* A wake-up between the thread's look at `stirs` and its sleep is lost: wake it until it has noticed. */
    for (int i = 0; i < STIR_TRIES && ms_load_acquire(&sleeper->is_asleep) && (int32_t)(wanted - ms_load_acquire(&sleeper->seen)) > 0; i++) {
        /* The kernel refuses the address if the thread has ended its sleep and unmapped the block meanwhile. */
        ms_futex_wake(&ms_load_relaxed(&sleeper->control)->arrival_seq.value, ms_load_relaxed(&sleeper->bits));
        nanosleep(&nap, NULL);
    }
}

void ms_arrivals_wake(struct ms_control *control, uint32_t bits)
{
    ms_add(&control->arrival_seq.value, 1);
    MS_FAILPOINT("arrivals_raised");
    if (bits != 0)
        ms_futex_wake(&control->arrival_seq.value, bits);
}

void ms_arrivals_level_moved(struct ms_control *control, int64_t from)
{
    ms_fence(); /* the position first: a message that is noted after this look is announced by the reputter */
    uint32_t bits = 0;
    for (uint32_t slot = 0; slot < MS_ARRIVAL_SLOTS; slot++)
        if (ms_load_relaxed(&control->arrivals.end[slot]) > from)
            bits |= ms_arrivals_bit(slot);
    if (bits != 0)
        ms_arrivals_wake(control, bits);
}
