#pragma once

#include <stddef.h>
#include <stdint.h>

#include "replication.cdef.h"

#define MS_REPLICATION_MAGIC 0x4d535245504c4943ull /* "MSREPLIC" */

_Static_assert(sizeof(struct ms_link) == 384, "a link has lines of its own");
_Static_assert(offsetof(struct ms_link, address) == 128, "the link's texts");
_Static_assert(offsetof(struct ms_replication, address) == 128, "texts of the link that ended last");
_Static_assert(offsetof(struct ms_replication, links) == 384, "links");
