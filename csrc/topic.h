/* Valid names of topics: they are names of folders too, and the bytes 1 and 2 separate properties. */
#pragma once

#include "record.h"

static inline int ms_topic_is_legal(const uint8_t *topic, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i++)
        if (topic[i] <= 2 || topic[i] == '/')
            return 0;
    if (topic[0] == '.' && (bytes == 1 || (bytes == 2 && topic[1] == '.')))
        return 0;
    return ms_record_text_is_clean(topic, bytes);
}

/* Return 1 for the name of a light queue, which has queue 0 only. */
static inline int ms_topic_is_light(const uint8_t *name, int64_t bytes)
{
    return bytes >= 5 && memcmp(name, "%LMQ%", 5) == 0;
}
