"""Numbers and names in the store's files, as in RocketMQ 4.9."""

from __future__ import annotations

import mmap

Readable = bytes | bytearray | memoryview | mmap.mmap  # what records, entries and headers are read from

# Commit log (CommitLog.MESSAGE_MAGIC_CODE, BLANK_MAGIC_CODE), as unsigned 32-bit numbers.
MESSAGE_MAGIC = 0xDAA320A7
BLANK_MAGIC = 0xCBD43194
BLANK_HEADER_BYTES = 8  # total size and magic; no process reads the filler after them
MESSAGE_BYTES_MIN = 91  # IPv4 hosts, no body, no topic, no properties

# sysFlag (MessageSysFlag).
SYS_FLAG_COMPRESSED = 0x1
SYS_FLAG_TRANSACTION_MASK = 0xC  # a field of two bits: compare the masked value, do not test single bits
SYS_FLAG_TRANSACTION_NONE = 0x0
SYS_FLAG_TRANSACTION_PREPARED = 0x4
SYS_FLAG_TRANSACTION_COMMIT = 0x8
SYS_FLAG_TRANSACTION_ROLLBACK = 0xC
SYS_FLAG_BORN_HOST_V6 = 0x10
SYS_FLAG_STORE_HOST_V6 = 0x20
SYS_FLAG_COMPRESSION_SHIFT = 8  # three bits: how a body with SYS_FLAG_COMPRESSED was compressed
SYS_FLAG_COMPRESSION_MASK = 0x7
COMPRESSION_NAMES = ("zlib", "LZ4", "ZSTD", "zlib")  # by that number; 0 is what clients before 4.9.4 wrote

# Limits of the record's own length fields, which Java reads as signed.
TOPIC_BYTES_MAX = 127
PROPERTIES_BYTES_MAX = 32767

# Property text: name 0x01 value, joined by 0x02.
NAME_VALUE_SEPARATOR = "\x01"
PROPERTY_SEPARATOR = "\x02"

# Property names with a meaning in the store (MessageConst).
PROPERTY_KEYS = "KEYS"
PROPERTY_TAGS = "TAGS"
PROPERTY_WAIT = "WAIT"
PROPERTY_DELAY = "DELAY"
PROPERTY_REAL_TOPIC = "REAL_TOPIC"
PROPERTY_REAL_QUEUE_ID = "REAL_QID"
PROPERTY_UNIQ_KEY = "UNIQ_KEY"
PROPERTY_SHARDING_KEY = "__SHARDINGKEY"
PROPERTY_RETRY_TOPIC = "RETRY_TOPIC"
PROPERTY_ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
PROPERTY_TRANSACTION_PREPARED = "TRAN_MSG"
PROPERTY_PRODUCER_GROUP = "PGROUP"
PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET = "TRAN_PREPARED_QUEUE_OFFSET"
PROPERTY_TRANSACTION_CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
PROPERTY_CHECK_IMMUNITY_TIME = "CHECK_IMMUNITY_TIME_IN_SECONDS"
PROPERTY_REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
PROPERTY_PUSH_REPLY_TIME = "PUSH_REPLY_TIME"
PROPERTY_INNER_MULTI_DISPATCH = "INNER_MULTI_DISPATCH"
PROPERTY_INNER_MULTI_QUEUE_OFFSET = "INNER_MULTI_QUEUE_OFFSET"
KEY_SEPARATOR = " "  # between the words of KEYS
MULTI_DISPATCH_SEPARATOR = ","

# Names that a user's property must not have (MessageConst.STRING_HASH_SET).
RESERVED_PROPERTY_NAMES = frozenset(
    "KEYS TAGS WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET BUYER_ID"
    " ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME MSG_REGION TRACE_ON UNIQ_KEY"
    " MAX_RECONSUME_TIMES CONSUME_START_TIME INSTANCE_ID CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME"
    " PUSH_REPLY_TIME CLUSTER MSG_TYPE INNER_MULTI_QUEUE_OFFSET".split()
)
# Names that the broker uses, but that RocketMQ's set does not contain.
INTERNAL_PROPERTY_NAMES = frozenset(
    "TRAN_PREPARED_QUEUE_OFFSET TRANSACTION_CHECK_TIMES CHECK_IMMUNITY_TIME_IN_SECONDS INNER_MULTI_DISPATCH"
    " __PYENGINE_DELIVER_AT __PYENGINE_TOPIC __PYENGINE_QID __PYENGINE_FIRST __PYENGINE_REASON".split()
)
# Properties of a message with a delivery time of its own (formats/delayed_message.py); RocketMQ does not know them.
PROPERTY_DELIVER_AT = "__PYENGINE_DELIVER_AT"
PROPERTY_TIMED_TOPIC = "__PYENGINE_TOPIC"
PROPERTY_TIMED_QUEUE_ID = "__PYENGINE_QID"
PROPERTY_TIMED_FIRST = "__PYENGINE_FIRST"
PROPERTY_REASON = "__PYENGINE_REASON"  # of a dead letter: why its group cannot handle it

# Properties with which clients of RocketMQ 5 say when a message is delivered, and the time that its broker notes (MessageConst).
PROPERTY_TIMER_DELAY_SEC, PROPERTY_TIMER_DELAY_MS = "TIMER_DELAY_SEC", "TIMER_DELAY_MS"
PROPERTY_TIMER_DELIVER_MS, PROPERTY_TIMER_OUT_MS = "TIMER_DELIVER_MS", "TIMER_OUT_MS"
PROPERTY_FIRST_POP_TIME = "1ST_POP_TIME"  # ms: of a message that clients of RocketMQ 5 took and gave back
PROPERTY_TIMER_DEL_UNIQKEY = "TIMER_DEL_UNIQKEY"  # takes back the message with this unique key

# Topics with a meaning in the store (TopicValidator, MixAll).
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
TIMER_TOPIC = "RMQ_SYS_PYENGINE_TIMER"
TIMER_GROUP = "CID_RMQ_SYS_PYENGINE_TIMER"
TRANSACTION_HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
TRANSACTION_OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRANSACTION_DISCARD_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
TRANSACTION_GROUP = "CID_RMQ_SYS_TRANS"
RETRY_PREFIX = "%RETRY%"  # followed by a consumer group: messages to deliver to it again
DLQ_PREFIX = "%DLQ%"      # followed by a consumer group: its dead letters
LMQ_PREFIX = "%LMQ%"
LMQ_QUEUE_ID = 0

# Consume queue.
CQ_ENTRY_BYTES = 20
CQ_FILLER_SIZE = 0x7FFFFFFF  # the size field of a filler entry, whose offset and tags code are 0
CQ_EXT_ADDRESS_MAX = -2147483649  # a tags code at or below this is an address in the extension
CQ_EXT_UNIT_BYTES_MIN = 20

# Index file.
INDEX_HEADER_BYTES = 40
INDEX_SLOT_BYTES = 4
INDEX_ENTRY_BYTES = 20
INDEX_KEY_SEPARATOR = "#"  # key text = topic # key

# Checkpoint.
CHECKPOINT_BYTES = 4096
CHECKPOINT_MARGIN_MS = 3000

# Names in the store's root.
SEGMENT_NAME_DIGITS = 20
INDEX_NAME_DIGITS = 17
