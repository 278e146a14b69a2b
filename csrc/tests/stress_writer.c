/* Producers, the writer and the flusher as threads over one control block: every
 * put is answered once and in order, queue offsets are dense, and a put that
 * waited for durability finds `flushed` beyond it. Answers of puts that no caller
 * waits for are taken by another thread, without the producer's lock, as
 * csrc/front/session.c does it. Run under TSan this checks the memory orders of
 * ring, commit slot, answers and sequences. */
#define RECORD_BODY_AT 88 /* with IPv4 hosts */
#include "check.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "../producer.h"
#include "../record.h"
#include "../writer.h"

#define PRODUCERS 3
#define PUTS 4000
#define BURST 16
#define RING_BYTES 65536
#define SEGMENT_BYTES (1 << 20)
#define SEGMENTS 24
#define TABLE_SLOTS 64

/* So far apart that passes choose among sessions. */
static const uint32_t slots[PRODUCERS] = {0, 70, 600};

static struct ms_control *control;
static struct ms_queue_table *queues;
static struct ms_session *sessions[PRODUCERS];
static struct ms_writer *writer;
static uint8_t *log_memory;
static uint32_t stop;

static void *zeroed(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static void *write_all(void *unused)
{
    (void)unused;
    int64_t next = writer->ahead[writer->ahead_count - 1].base + SEGMENT_BYTES;
    while (!ms_load_acquire(&stop)) {
        int reason = ms_writer_run(writer, ms_monotonic_ns() + 5000000);
        if (reason == MS_RUN_TIME)
            continue;
        CHECK(reason == MS_RUN_ROLLED || reason == MS_RUN_SEGMENT);
        writer->rolled = 0;
        while (writer->ahead_count < 2) {
            CHECK(next < (int64_t)SEGMENT_BYTES * SEGMENTS);
            writer->ahead[writer->ahead_count++] = (struct ms_segment){next, log_memory + next, -1};
            next += SEGMENT_BYTES;
        }
    }
    return NULL;
}

static void *flush_all(void *unused)
{
    (void)unused;
    while (!ms_load_acquire(&stop)) {
        struct ms_commit_totals committed;
        ms_control_committed_slot(control, &committed);
        if (committed.wrote > ms_load_acquire(&control->flushed.value))
            ms_control_publish_flushed(control, committed.wrote, 1);
        else
            usleep(50);
    }
    return NULL;
}

static struct ms_producer producers[PRODUCERS];
static uint8_t is_taken_elsewhere[PRODUCERS][PUTS + 1];

static void *take_answers(void *number)
{
    struct ms_producer *producer = &producers[(uintptr_t)number];
    for (uint64_t first = 1; first <= PUTS;) {
        uint64_t acked = ms_load_acquire(&producer->session->acked), submitted = ms_load_relaxed(&producer->sequence);
        for (; first <= acked && first <= submitted; first++) {
            if (!ms_load_relaxed(&is_taken_elsewhere[(uintptr_t)number][first]))
                continue;
            const struct ms_completion answer = producer->session->completion[first % MS_COMPLETIONS];
            CHECK(answer.sequence == first && answer.status == 0 && answer.queue_offset == (int64_t)first - 1);
            ms_producer_finish(producer, first);
        }
        usleep(20);
    }
    return NULL;
}

static void *produce(void *number)
{
    uint32_t own = (uint32_t)(uintptr_t)number;
    struct ms_producer *producer = &producers[own];
    producer->timeout_ns = producer->flush_timeout_ns = 20000000000;
    char topic[8];
    snprintf(topic, sizeof topic, "P%u", own);
    uint8_t prefix[256], body[600];
    const struct ms_entry common = {.topic_bytes = 2, .properties_bytes = 6};
    ms_entry_fill(prefix, &common, (uint8_t *)topic, (uint8_t *)"TAGS\1t", NULL, 0);
    memset(body, (int)own, sizeof body);
    for (int64_t n = 0; n < PUTS; n++) {
        memcpy(body, &n, sizeof n);
        int durable = n % 7 == 0;
        uint32_t body_bytes = 8 + (uint32_t)(n % 500);
        int how = durable ? MS_PUT_DURABLE : 0, code;
        uint8_t *to;
        while ((to = ms_producer_reserve(producer, prefix, MS_ENTRY_PUT, 1, body_bytes, &code)) == NULL && code == MS_PRODUCER_AGAIN)
            CHECK(ms_producer_wait_for_room(producer, 1024, ms_monotonic_ns() + producer->timeout_ns) == 0);
        CHECK(to != NULL);
        memcpy(to, body, body_bytes);
        if (n % 64 < BURST) {
            ms_store_relaxed(&is_taken_elsewhere[own][n + 1], (uint8_t)1);
            ms_producer_publish(producer);
            producer->unclaimed = 0;
            continue;
        }
        ms_producer_publish(producer);
        ms_producer_is_answered(producer, 1 + (int)(n % 50));
        code = ms_producer_await(producer, how);
        if (code == MS_PRODUCER_UNFINISHED) { /* a loaded machine */
            const uint64_t sequence = producer->sequence;
            producer->unclaimed = 0;
            int64_t deadline_ns = ms_monotonic_ns() + 20000000000;
            code = ms_producer_wait_acked(producer, sequence, deadline_ns, &producer->answer);
            if (code == 0 && durable)
                code = ms_producer_wait_persisted(producer, producer->answer.end_offset, MS_PUT_DURABLE, deadline_ns, 0, INT64_MAX);
            ms_producer_finish(producer, sequence);
        }
        CHECK(code == 0);
        CHECK(producer->answer.status == 0 && producer->answer.queue_offset == n);
        CHECK(ms_load_acquire(&control->wrote.value) >= producer->answer.end_offset);
        if (durable)
            CHECK(ms_load_acquire(&control->flushed.value) >= producer->answer.end_offset);
        int64_t stored;
        memcpy(&stored, log_memory + producer->answer.physical_offset + RECORD_BODY_AT, sizeof stored);
        CHECK(stored == n);
    }
    return NULL;
}

int main(void)
{
    control = zeroed(sizeof *control);
    queues = zeroed((size_t)ms_queue_table_bytes(TABLE_SLOTS));
    writer = zeroed(sizeof *writer);
    log_memory = zeroed((size_t)SEGMENT_BYTES * SEGMENTS);
    ms_queue_table_format(queues, TABLE_SLOTS, 1);
    control->identity.segment_bytes = SEGMENT_BYTES;
    control->identity.max_message_bytes = 4 << 20;
    control->identity.spin_producer_us = 20;
    control->state.state = MS_STATE_RUNNING;
    control->allocator.reserved_end = INT64_MAX;
    ms_control_publish(control);

    control->workers[MS_WRITER].pid = getpid();
    CHECK(ms_latch_hear_rings(&control->latch[MS_WRITER]) == 0);

    writer->control = control;
    writer->queues = queues;
    writer->segment_bytes = SEGMENT_BYTES;
    writer->max_message_bytes = 4 << 20;
    writer->spin_us = 20;
    writer->current.base = -1;
    writer->scratch_bytes = RING_BYTES;
    writer->scratch = zeroed(RING_BYTES);
    ms_writer_open(writer);
    writer->ahead[writer->ahead_count++] = (struct ms_segment){0, log_memory, -1};
    for (uint32_t i = 0; i < PRODUCERS; i++) {
        sessions[i] = zeroed((size_t)ms_session_bytes(RING_BYTES));
        ms_session_format(sessions[i], RING_BYTES, slots[i], 1, 1);
        control->sessions[slots[i]].generation = 1;
        control->sessions[slots[i]].state = MS_SESSION_OPEN;
        ms_writer_attach_session(writer, slots[i], sessions[i], 1, RING_BYTES);
    }

    pthread_t workers[2], producing[PRODUCERS], taking[PRODUCERS];
    CHECK(pthread_create(&workers[0], NULL, write_all, NULL) == 0);
    CHECK(pthread_create(&workers[1], NULL, flush_all, NULL) == 0);
    for (uintptr_t i = 0; i < PRODUCERS; i++) {
        producers[i].control = control;
        producers[i].session = sessions[i];
        producers[i].slot = slots[i];
        producers[i].generation = 1;
        ms_producer_attach(&producers[i]);
        CHECK(pthread_create(&producing[i], NULL, produce, (void *)i) == 0);
        CHECK(pthread_create(&taking[i], NULL, take_answers, (void *)i) == 0);
    }
    for (int i = 0; i < PRODUCERS; i++) {
        pthread_join(producing[i], NULL);
        pthread_join(taking[i], NULL);
    }
    ms_store_release(&stop, 1u);
    pthread_join(workers[0], NULL);
    pthread_join(workers[1], NULL);

    int64_t at = 0, records = 0, end = ms_load_acquire(&control->wrote.value);
    while (at < end) {
        int what = ms_record_classify(log_memory + at, SEGMENT_BYTES - at % SEGMENT_BYTES, at,
                                      MS_CHECK_CRC | MS_CHECK_TEXT | MS_CHECK_OFFSET);
        uint32_t bytes = (uint32_t)log_memory[at] << 24 | (uint32_t)log_memory[at + 1] << 16 |
                         (uint32_t)log_memory[at + 2] << 8 | log_memory[at + 3];
        CHECK(what == MS_CASE_MESSAGE || what == MS_CASE_BLANK);
        records += what == MS_CASE_MESSAGE;
        at += bytes;
    }
    CHECK(at == end && records == PRODUCERS * PUTS);
    return 0;
}
