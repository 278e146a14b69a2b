/* Why each worker is blocked at present, for `status`.
 *
 * Who: the supervisor creates it at start beside the control block; each worker writes the line of its own kind (the
 * supervisor the workers that it must restart); any process reads, and none depends on it. Blocks on: nothing. After a
 * crash: the dead worker's text stays until its successor is ready.
 */
#define MS_BLOCKED_REASONS_LAYOUT_VERSION 3
#define MS_BLOCKED_REASON_BYTES 504

struct ms_blocked_reason {
    uint32_t changes;            /* odd while the text is being written */
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

/* The supervisor: initialize zeros. */
void ms_blocked_reasons_format(struct ms_blocked_reasons *blocked_reasons);
/* 0, or -EPROTO wrong magic, -EBADMSG other layout, -EMSGSIZE too short. */
int ms_blocked_reasons_check(const struct ms_blocked_reasons *blocked_reasons, int64_t mapped_bytes);
/* Write the worker's own line; truncate a long text. */
void ms_blocked_reason_write(struct ms_blocked_reasons *blocked_reasons, uint32_t kind, const char *text);
/* Copy one consistent text with its NUL to `into`; or the text as it is, if its worker died while it wrote it. */
void ms_blocked_reason_read(const struct ms_blocked_reasons *blocked_reasons, uint32_t kind, char *into);
