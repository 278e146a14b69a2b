/* Checks an entry of a submission ring: whether it is well formed and legal, the size of its records, and the next one.
 * Its lengths and routing were copied into the writer's memory; the bodies may still be in the ring, and are not read here.
 *
 * Who: the writer process, for each entry of its pass. Blocks on: nothing. After a crash: nothing remains, it uses
 * private memory only. It neither reads nor changes the store.
 */
#define MS_SIDE_BYTES_MAX 268435456 /* the largest entry, and the largest sum of its records */
#define MS_RECORD_ALLOWANCE_BYTES 65536 /* how much longer a record may be than the longest body: RocketMQ's 64 KiB */

/* Why an entry was refused: the value of ms_completion.detail and session.closed. */
#define MS_REFUSED_NO 0
#define MS_REFUSED_TOPIC_LENGTH 1
#define MS_REFUSED_TOPIC_BYTES 2
#define MS_REFUSED_PROPERTIES_LENGTH 3
#define MS_REFUSED_PROPERTIES_BYTES 4
#define MS_REFUSED_BODY_LENGTH 5
#define MS_REFUSED_SEGMENT 6     /* no segment can hold it */
#define MS_REFUSED_STOPPING 7
#define MS_REFUSED_READ_ONLY 8
#define MS_REFUSED_DISK_FULL 9
#define MS_REFUSED_SLAVE 10
#define MS_REFUSED_NO_SEGMENT 11 /* the next segment could not be made */
#define MS_REFUSED_BATCH 12      /* batch with a transaction type, or malformed members */
#define MS_REFUSED_QUEUE_ID 13
#define MS_REFUSED_QUEUES_FULL 14
#define MS_REFUSED_TOO_MANY_SEGMENTS 15
#define MS_REFUSED_SIDE 16       /* the side object is missing or not as announced */
#define MS_REFUSED_MALFORMED 17  /* the entry contradicts itself: its session is closed */
#define MS_REFUSED_SEQUENCE 18   /* not the next sequence number: its session is closed */
#define MS_REFUSED_TOO_LARGE 19  /* its records together are larger than a pass may be */
#define MS_REFUSED_LIGHT_QUEUE_NAME 20 /* a name in INNER_MULTI_DISPATCH */
#define MS_REFUSED_LIGHT_QUEUES_FULL 21
#define MS_REFUSED_OFFSET 22     /* raw records that do not begin where the log ends */
#define MS_REFUSED_RAW 24        /* raw bytes that are not whole records of this place, or not from the replicator */
#define MS_REFUSED_FENCED 25     /* a master of a higher term has taken the place of this one */
#define MS_REFUSED_LIGHT_QUEUE_PLACE 26 /* several messages that have INNER_MULTI_QUEUE_OFFSET */
#define MS_REFUSED_LOST 27       /* the store's folder was moved, removed or replaced */
#define MS_REFUSED_UNWRITABLE 23 /* a folder of the store has become read-only */
