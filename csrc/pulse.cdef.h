/* Does what a process must do twice a second for its consumers while nothing happens, and returns once something has changed.
 *
 * A *beat* is what one consumer, or one member of a group, is watched by: a member's heartbeat is written into the file of its
 * group, whose layout ipc/group_members.py describes; the records of the other members and of the queues, the kernel's locks of
 * members, and names of files are compared with what they were at the look before. The first look, or one that finds a difference,
 * raises MS_BEAT_CHANGED. What is seldom replaced, MS_NAME_FILE and MS_NAME_LOCK, is looked at each second time.
 *
 * Who: ms_pulse_wait, one thread of a process with consumers, without the interpreter; the rest, any thread. Blocks on:
 * ms_pulse_wait; the others on a mutex that is held for a pass over all beats, which reads and writes files. After a crash the
 * kernel has released the locks, and the last record stays. A forked child has no such thread: it calls nothing here for a pulse
 * of its parent.
 */
#pragma once

#define MS_BEAT_CHANGED 1        /* of ms_beat_take: something is not as it was */
#define MS_BEAT_ROUSED 2         /* of ms_beat_take: ms_beat_rouse was called */

/* What of a name is compared. */
#define MS_NAME_FILE 0           /* which file it is */
#define MS_NAME_LENGTH 1         /* and how long */
#define MS_NAME_FOLDER 2         /* which folder it is, and when names in it changed; such a change counts for MS_NAME_RECENT_NS */
#define MS_NAME_LOCK 3           /* which file it is, and which lock is on its first byte */
#define MS_NAME_RECENT_NS 5000000000 /* what is in a new folder may come a little later than the folder */

#define MS_MEMBER_SLOTS_MAX 1024

/* One member of a group, and where its file has what. */
struct ms_member {
    uint64_t incarnation;
    uint64_t heartbeats;         /* written so far */
    int64_t slots_at;            /* the records of members of its kind, and the locks of those */
    int64_t locks_at;
    int64_t records_at;          /* of queues */
    int32_t fd;                  /* open until ms_beat_remove */
    uint32_t slot;               /* its own */
    uint32_t pid;
    uint32_t wanted;             /* stands for its tags and condition */
    uint32_t slots;              /* how many may have a member of which it must know */
};

/* Set `found[i]` to 1 if another open file has a lock on byte start + i, for each of `count`; 0 or -errno. From any thread. */
int ms_locks_find(int32_t fd, int64_t start, int64_t count, uint8_t *found);

/* NULL without memory. It is never freed, since its thread may outlive the interpreter. */
void *ms_pulse_new(void);
/* Beat each `interval_ns`; return after a beat that has something to take, or if there is none, or after one at `timeout_ns`. */
void ms_pulse_wait(void *pulse, int64_t interval_ns, int64_t timeout_ns);
/* Return how often it has beaten. */
uint32_t ms_pulse_beats(void *pulse);
/* Begin a beat, of a member or (NULL) of none; NULL without memory. */
void *ms_beat_add(void *pulse, const struct ms_member *member);
/* End a beat and free it. Afterwards the member's descriptor is not used any more. */
void ms_beat_remove(void *pulse, void *beat);
/* Watch a name too: 0, or -ENOMEM. */
int ms_beat_watch(void *pulse, void *beat, const char *path, int32_t what);
/* Watch no names any more. */
void ms_beat_forget(void *pulse, void *beat);
/* Watch the records of the first `records` queues. */
void ms_beat_set_records(void *beat, uint32_t records);
/* Let the thread return after the next beat. */
void ms_beat_rouse(void *beat);
/* Return MS_BEAT_*, and clear them. */
uint32_t ms_beat_take(void *beat);
