/* Measures the cost of a pass of the writer: producer and writer in one thread, no sleeps, no other process.
 *
 * usage: writer_pass BODY_BYTES DEPTH MANY SESSIONS [SLICES]
 *   BODY_BYTES of each message; DEPTH entries are submitted before the writer runs; MANY messages in each entry,
 *   0: ordinary puts; SESSIONS open ones, of which the last one puts. Of SLICES rounds it prints the fastest submission
 *   and the fastest pass, and the CPU time that a round took in the mean, in nanoseconds.
 * bench/writer_pass.sh builds and runs it.
 */
#define _GNU_SOURCE
#include <errno.h> /* not base.h: an older tree is measured beside this one */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "atomics.h"
#include "bytes.h"
#include "failpoint.h"
#include "futex.h"
#include "control.h"
#include "producer.h"
#include "queue_table.h"
#include "session.h"
#include "store_stats.h"
#include "writer.h"

#define RING_BYTES (4 << 20)
#define QUIET_RING_BYTES 4096
#define SEGMENT_BYTES ((int64_t)128 << 20)
#define ROUND_BYTES_MAX ((int64_t)16 << 20)
#define SECOND_NS 1000000000

static void *zeroed(int64_t bytes)
{
    void *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    return memory;
}

/* Keep the smallest value. */
static void least(int64_t *best, int64_t ns)
{
    if (*best == 0 || ns < *best)
        *best = ns;
}

static int64_t cpu_ns(void)
{
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (int64_t)used.tv_sec * SECOND_NS + used.tv_nsec;
}

int main(int count, char **arguments)
{
    if (count < 5) {
        fprintf(stderr, "usage: writer_pass BODY_BYTES DEPTH MANY SESSIONS [SLICES]\n");
        return 2;
    }
    uint32_t body_bytes = (uint32_t)atoi(arguments[1]);
    uint32_t depth = (uint32_t)atoi(arguments[2]), many = (uint32_t)atoi(arguments[3]);
    uint32_t open = (uint32_t)atoi(arguments[4]), slices = count > 5 ? (uint32_t)atoi(arguments[5]) : 400;
    uint32_t messages = many ? many : 1;

    struct ms_control *control = zeroed((int64_t)sizeof(struct ms_control));
    struct ms_queue_table *queues = zeroed(ms_queue_table_bytes(1024));
    ms_queue_table_format(queues, 1024, 1);
    control->identity.segment_bytes = SEGMENT_BYTES;
    control->identity.max_message_bytes = 4 << 20;
    control->identity.os_page_cache_busy_timeout_ms = 1000;
    control->state.state = MS_STATE_RUNNING;
    control->latch[MS_WRITER].has_notified = 1;
    memset(&control->allocator, 0x3f, sizeof control->allocator); /* its log is memory: all of it may be used */
    ms_control_publish(control);

    struct ms_writer *writer = zeroed((int64_t)sizeof(struct ms_writer));
    writer->control = control;
    writer->queues = queues;
    writer->segment_bytes = SEGMENT_BYTES;
    writer->max_message_bytes = 4 << 20;
    writer->scratch_bytes = RING_BYTES / 2;
    writer->scratch = zeroed(RING_BYTES / 2);
    struct ms_store_stats *stats = zeroed((int64_t)sizeof *stats);
    writer->meter.stats = &stats->put;
    ms_writer_open(writer);
    writer->current = (struct ms_segment){0, zeroed(SEGMENT_BYTES), -1};

    struct ms_producer *producer = zeroed((int64_t)sizeof *producer);
    for (uint32_t i = 0; i < open; i++) {
        uint64_t ring_bytes = i == open - 1 ? RING_BYTES : QUIET_RING_BYTES;
        struct ms_session *session = zeroed(ms_session_bytes(ring_bytes));
        ms_session_format(session, ring_bytes, i, 1, 1);
        control->sessions[i].generation = 1;
        control->sessions[i].state = MS_SESSION_OPEN;
        ms_writer_attach_session(writer, i, session, 1, ring_bytes);
        *producer = (struct ms_producer){
            .control = control,
            .session = session,
            .slot = i,
            .generation = 1,
        };
    }
    ms_producer_attach(producer);

    uint64_t lengths_bytes = many ? ms_align8((uint64_t)many * 4) : 0;
    const uint64_t payload_bytes = lengths_bytes + (uint64_t)body_bytes * messages;
    uint8_t *payload = zeroed((int64_t)payload_bytes + 8);
    memset(payload + lengths_bytes, 'x', (size_t)body_bytes * messages);
    for (uint32_t i = 0; i < many; i++)
        ((uint32_t *)(void *)payload)[i] = body_bytes;
    int64_t submit_ns = 0, pass_ns = 0, cpu_from_ns = cpu_ns();
    for (uint32_t slice = 0; slice < slices; slice++) {
        if (writer->position > SEGMENT_BYTES - ROUND_BYTES_MAX)
            writer->position = 0; /* the same pages again */
        int64_t begun = ms_monotonic_ns();
        for (uint32_t i = 0; i < depth; i++) {
            struct ms_entry header = {
                .kind = many ? MS_ENTRY_MANY : MS_ENTRY_PUT,
                .count = messages,
                .topic_bytes = 5,
                .payload_bytes = (uint32_t)payload_bytes,
                .born_timestamp_ms = ms_wall_ms(),
            };
            if (ms_producer_submit(producer, &header, (const uint8_t *)"bench", NULL, payload, payload_bytes,
                                   ms_monotonic_ns() + SECOND_NS) != 0)
                return 1;
        }
        int64_t submitted = ms_monotonic_ns();
        int why;
        do
            why = ms_writer_run(writer, 1);
        while (why == MS_RUN_TIME && !ms_writer_session_drained(writer, open - 1));
        if (why != MS_RUN_TIME)
            return 1;
        int64_t passed = ms_monotonic_ns();
        for (uint32_t i = 0; i < depth; i++) {
            struct ms_completion answer;
            uint64_t sequence = producer->sequence - depth + 1 + i;
            if (ms_producer_wait_acked(producer, sequence, 1, &answer) != 0 || answer.status != 0)
                return 1;
            producer->unclaimed = 0;
            ms_producer_finish(producer, sequence);
        }
        least(&submit_ns, submitted - begun);
        least(&pass_ns, passed - submitted);
    }
    double all = (double)depth * messages;
    printf("%5u B x %3u, %3u entries, %4u sessions: submit %8lld, pass %8lld, CPU %8lld; a message: submit %6.1f, pass %6.1f\n",
           body_bytes, messages, depth, open, (long long)submit_ns, (long long)pass_ns, (long long)((cpu_ns() - cpu_from_ns) / slices),
           (double)submit_ns / all, (double)pass_ns / all);
    return 0;
}
