/* Compares queues and index with the log: the loops of the whole-store check.
 *
 * Who: `check`, over read-only mappings of its own. Blocks on: page faults only. Crash states: none, it writes nothing. It
 * trusts no offset or length in a file, and reads nothing outside [base_offset, limit) of the view.
 */
#pragma once

/* Count the first of the `count` entries (20 bytes each, the first has queue offset `first_queue_offset`) that point to
 * their own record: it is in [base_offset, limit), beyond `after`, with this size, topic, queue id and queue offset, and
 * with this tags code unless `check_tags` is 0 or the code is an address of the queue extension. With `check_offset` it
 * has this physical offset too. */
int64_t ms_check_entries(const uint8_t *view, int64_t base_offset, int64_t limit, const uint8_t *topic,
                         int32_t topic_bytes, int32_t queue_id, int64_t first_queue_offset, const uint8_t *entries,
                         int64_t count, int64_t after, int check_tags, int check_offset);

/* Return 0 if every entry of [1, count) is chained to the previous one of its slot and every slot names its newest, or one of
 * [count, end) that is chained to it: those are put meanwhile. Otherwise the first entry for which that fails, or -1 - slot.
 * `heads` has `slots` zeros. The whole file is at `file`, and count <= end <= entries. */
int64_t ms_check_chains(const uint8_t *file, int32_t slots, int32_t count, int32_t end, int32_t *heads);

/* Return the first entry of [first, end) whose record is not in [base_offset, limit) or has no key with that hash; `end` if
 * there is none. `entry_zero` points to entry 0 of the index file. */
int32_t ms_check_keys(const uint8_t *view, int64_t base_offset, int64_t limit, const uint8_t *entry_zero, int32_t first,
                      int32_t end);

/* Count the keys that dispatch would put for the records of [start, end); stop at anything but a record. */
int64_t ms_check_count_keys(const uint8_t *view, int64_t base_offset, int64_t start, int64_t end);
