/* Why each worker is blocked at present, for `status`.
 *
 * Who: the supervisor creates it at start beside the control block; each worker writes the line of its own kind (the
 * supervisor the workers that it must restart); any process reads, and none depends on it. Blocks on: nothing. After a
 * crash: the dead worker's text stays until its successor is ready.
 */
#define MS_BLOCKED_REASONS_LAYOUT_VERSION 3
#define MS_BLOCKED_REASON_BYTES 504

struct ms_blocked_reason {
    uint32_t changes;            /* of the text (shared_text.cdef.h) */
    uint32_t reserved;
    int8_t text[MS_BLOCKED_REASON_BYTES]; /* UTF-8, NUL-terminated; empty: nothing */
};

struct ms_blocked_reasons {
    uint64_t magic;              /* stored last, with release: "MSBLOCKD" */
    uint32_t layout_version;
    uint32_t reserved;
    int8_t pad[112];
    struct ms_blocked_reason worker[MS_WORKER_KINDS];
};
