/* The property text of a record: name 0x01 value, joined by 0x02 (docs/formats.md section 6).
 *
 * Who: dispatch (reputter, recovery) and the column scanner. It is a header only, so that both loops inline it. As in
 * MessageDecoder.string2messageProperties it ignores a piece without 0x01, or with an empty name or value; the first 0x01
 * splits; the last of equal names wins.
 */
#pragma once

#include "record.h"

/* Return the next piece of `rest` up to `separator`, also an empty one; 0 at the end. */
static inline int ms_text_split(struct ms_text *rest, uint8_t separator, struct ms_text *piece)
{
    if (rest->at == NULL)
        return 0;
    const uint8_t *const stop = memchr(rest->at, separator, (size_t)rest->bytes);
    piece->at = rest->at;
    if (stop == NULL) {
        piece->bytes = rest->bytes;
        rest->at = NULL;
        return 1;
    }
    piece->bytes = stop - rest->at;
    rest->bytes -= piece->bytes + 1;
    rest->at = stop + 1;
    return 1;
}

/* Return the next name and value of `rest`, a property text; 0 at the end. */
static inline int ms_property_next(struct ms_text *rest, struct ms_text *name, struct ms_text *value)
{
    struct ms_text piece;
    while (ms_text_split(rest, 2, &piece)) {
        const uint8_t *const split = memchr(piece.at, 1, (size_t)piece.bytes), *const end = piece.at + piece.bytes;
        if (split == NULL || split == piece.at || split + 1 == end)
            continue;
        *name = (struct ms_text){piece.at, split - piece.at};
        *value = (struct ms_text){split + 1, end - split - 1};
        return 1;
    }
    return 0;
}

static inline int ms_text_equals(struct ms_text text, const char *other, int64_t bytes)
{
    return text.bytes == bytes && memcmp(text.at, other, (size_t)bytes) == 0;
}

/* The properties that determine a record's queues. */
struct ms_routing {
    struct ms_text tags;
    struct ms_text keys;
    struct ms_text uniq_key;
    struct ms_text delay;
    struct ms_text multi_dispatch;
    struct ms_text multi_queue_offset;
};

#define ROUTE(property, field)                               \
    if (ms_text_equals(name, property, sizeof property - 1)) \
    found->field = value

static inline void ms_property_routing(const uint8_t *text, int64_t bytes, struct ms_routing *found)
{
    struct ms_text rest = {text, bytes}, name, value;
    memset(found, 0, sizeof *found);
    while (ms_property_next(&rest, &name, &value)) {
        ROUTE("TAGS", tags);
        ROUTE("KEYS", keys);
        ROUTE("DELAY", delay);
        ROUTE("UNIQ_KEY", uniq_key);
        ROUTE("INNER_MULTI_DISPATCH", multi_dispatch);
        ROUTE("INNER_MULTI_QUEUE_OFFSET", multi_queue_offset);
    }
}
#undef ROUTE

/* An iterator over a record's keys in the order of dispatch: UNIQ_KEY, then the words of KEYS. */
struct ms_keys {
    struct ms_text uniq_key;
    struct ms_text words;
};

static inline struct ms_keys ms_keys_of(const struct ms_record *record, const struct ms_routing *routing)
{
    if ((record->sys_flag & MS_SYS_FLAG_TRANSACTION) == MS_SYS_FLAG_ROLLBACK)
        return (struct ms_keys){{NULL, 0}, {NULL, 0}};
    return (struct ms_keys){routing->uniq_key, routing->keys};
}

static inline int ms_keys_next(struct ms_keys *keys, struct ms_text *key)
{
    if (keys->uniq_key.at != NULL) {
        *key = keys->uniq_key;
        keys->uniq_key.at = NULL;
        return 1;
    }
    while (ms_text_split(&keys->words, ' ', key))
        if (key->bytes > 0)
            return 1;
    return 0;
}

/* Parse a decimal number like Java's parseInt and parseLong; 0 if the text is no number or out of range. */
static inline int ms_text_number(struct ms_text text, int64_t low, int64_t high, int64_t *number)
{
    const uint8_t *at = text.at, *const end = text.at + text.bytes;
    int64_t value = 0;
    const int negative = text.bytes > 0 && *at == '-';
    if (text.bytes > 0 && (*at == '-' || *at == '+'))
        at++;
    if (text.at == NULL || at == end)
        return 0;
    for (; at < end; at++) { /* as a negative number, since the lowest one has no positive counterpart */
        if (*at < '0' || *at > '9' || __builtin_mul_overflow(value, (int64_t)10, &value) ||
            __builtin_sub_overflow(value, (int64_t)(*at - '0'), &value))
            return 0;
    }
    if (!negative && __builtin_sub_overflow((int64_t)0, value, &value))
        return 0;
    *number = value;
    return value >= low && value <= high;
}
