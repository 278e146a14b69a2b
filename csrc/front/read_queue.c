/* Reads the messages of consume queue entries in one call: RocketMQ's getMessage between two limits.
 *
 * Who: readers, under the GIL. Blocks on: page faults. After a crash: nothing remains. It does not trust the bytes of either
 * file: it reads a length once and bounds it by the mapping, and uses a record only if it is whole, has the entry's size and
 * offset, and belongs to the queue. It calls Python at the begin of a segment, and in rare cases: for an extension's tags
 * code, and for a record of several queues.
 */
#include "front.h"

#include "consume_queue.h"
#include "record.h"

#define RECORDS_ROOM 40960 /* for 32 messages of 1 KiB */

enum outcome { NOTHING_MATCHED = 1,
               WAS_REMOVED = 2,
               FOUND = 0 }; /* values of GetStatus */

struct segment {
    Py_buffer view;          /* .obj == NULL: the segment does not exist */
    int64_t start, end;
};

/* Joined records, as they are in the log. */
struct records {
    uint8_t *bytes;
    int64_t length, room;
    int64_t first_offset;    /* physical offset of the first one */
};

struct limits {
    long long messages_max, log_end, in_memory_bytes;
    long long bytes_in_memory, count_in_memory, bytes_on_disk, count_on_disk;
};

struct entry {
    int64_t offset, code;
    int32_t size;
};

struct reading {
    struct segment segment;
    int64_t gone_from, gone_to; /* of a segment that does not exist: its messages do not exist either */
    struct records *records; /* NULL: make messages */
    const char *topic;       /* of the queue, UTF-8 */
    Py_ssize_t topic_bytes;
    PyObject *messages, *numbers;
    PyObject *topic_text, *tags, *find_segment, *find_code, *belongs;
    const int32_t *codes;    /* hashes of the wanted tags */
    Py_ssize_t code_count;
    int queue_id;
    struct limits limits;
    long long count;         /* of the records taken, with their bytes */
    int64_t total_bytes;
};

static int enter_segment(struct reading *reading, int64_t offset)
{
    struct segment *segment = &reading->segment;
    PyBuffer_Release(&segment->view);
    segment->start = segment->end = 0;
    PyObject *found = PyObject_CallFunction(reading->find_segment, "L", (long long)offset);
    if (found == NULL)
        return -1;
    long long start, end;
    PyObject *view;
    int result = PyArg_ParseTuple(found, "LLO", &start, &end, &view) ? 0 : -1;
    if (result == 0 && view != Py_None)
        result = PyObject_GetBuffer(view, &segment->view, PyBUF_SIMPLE);
    if (result == 0) {
        segment->start = start;
        segment->end = end;
    }
    Py_DECREF(found);
    return result;
}

/* Return whether the entry may have a wanted tag: 1 or 0; -1 with an exception. */
static int code_matches(const struct reading *reading, int64_t code)
{
    if (code <= MS_EXT_ADDRESS_MAX) {
        PyObject *known = PyObject_CallFunction(reading->find_code, "L", (long long)code);
        if (known == NULL)
            return -1;
        const int is_unknown = known == Py_None;
        code = is_unknown ? 0 : PyLong_AsLongLong(known);
        Py_DECREF(known);
        if (is_unknown)
            return 1;
        if (code == -1 && PyErr_Occurred())
            return -1;
    }
    for (Py_ssize_t i = 0; i < reading->code_count; i++)
        if (reading->codes[i] == (int32_t)(uint32_t)(uint64_t)code)
            return 1;
    return 0;
}

/* Find the entry's record; return whether it is where the entry says. */
static int find_record(const struct reading *reading, const struct entry *entry, struct ms_record *record)
{
    const struct segment *segment = &reading->segment;
    const int64_t at = entry->offset - segment->start;
    return segment->view.obj != NULL && at >= 0 && at < segment->view.len &&
           ms_record_parse((const uint8_t *)segment->view.buf + at, segment->view.len - at, record) == MS_CASE_MESSAGE &&
           record->size_bytes == entry->size && ms_record_physical_offset(record) == entry->offset;
}

static int is_of_topic(const struct reading *reading, const struct ms_record *record)
{
    return record->topic_bytes == reading->topic_bytes && memcmp(record->topic, reading->topic, (size_t)record->topic_bytes) == 0;
}

/* Return the message of an entry, None if there is none, NULL with an exception. */
static PyObject *read_message(const struct reading *reading, const struct entry *entry)
{
    struct ms_record record;
    if (!find_record(reading, entry, &record))
        return Py_NewRef(Py_None);
    const int is_topic = is_of_topic(reading, &record);
    const int is_own = is_topic && ms_record_queue_id(&record) == reading->queue_id;
    PyObject *message = message_of(&record, is_topic ? reading->topic_text : NULL);
    if (message == NULL || is_own)
        return message;
    PyObject *answer = PyObject_CallFunction(reading->belongs, "OOi", message, reading->topic_text, reading->queue_id);
    const int belongs = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    if (belongs == 1)
        return message;
    Py_DECREF(message);
    return belongs == 0 ? Py_NewRef(Py_None) : NULL;
}

static int tag_matches(const struct reading *reading, PyObject *message)
{
    PyObject *tags = message_tags(message, NULL);
    const int matches = tags == NULL ? -1 : PySequence_Contains(reading->tags, tags);
    Py_XDECREF(tags);
    return matches;
}

static int add(PyObject *messages, PyObject *message, PyObject *numbers, long long number)
{
    PyObject *object = PyLong_FromLongLong(number);
    const int failed = object == NULL || PyList_Append(messages, message) != 0 || PyList_Append(numbers, object) != 0;
    Py_XDECREF(object);
    return failed ? -1 : 0;
}

/* Append the record's bytes to the others; -1 with an exception. */
static int keep_record(struct records *records, const struct ms_record *record, int64_t offset)
{
    const int64_t length = records->length + record->size_bytes;
    if (length > records->room) {
        const int64_t room = length > RECORDS_ROOM ? 2 * length : RECORDS_ROOM;
        uint8_t *bytes = PyMem_Realloc(records->bytes, (size_t)room);
        if (bytes == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        records->bytes = bytes;
        records->room = room;
    }
    if (records->length == 0)
        records->first_offset = offset;
    memcpy(records->bytes + records->length, record->start, (size_t)record->size_bytes);
    records->length = length;
    return 0;
}

enum taken { FAILED = -1,
             NOT_THERE,
             NOT_WANTED,
             TAKEN };

/* Add the record of an entry, as a message or as bytes. `number`: the entry's queue offset. */
static enum taken add_record(struct reading *reading, const struct entry *entry, long long number)
{
    struct ms_record record;
    struct records *const records = reading->records;
    if (records != NULL && reading->tags == Py_None && find_record(reading, entry, &record) && is_of_topic(reading, &record) &&
        ms_record_queue_id(&record) == reading->queue_id)
        return keep_record(records, &record, entry->offset) == 0 ? TAKEN : FAILED;
    PyObject *message = read_message(reading, entry);
    if (message == NULL)
        return FAILED;
    enum taken taken = message == Py_None ? NOT_THERE : TAKEN;
    if (taken == TAKEN && reading->tags != Py_None) {
        const int matches = tag_matches(reading, message);
        taken = matches < 0 ? FAILED : matches > 0 ? TAKEN
                                                   : NOT_WANTED;
    }
    if (taken == TAKEN && records == NULL)
        taken = add(reading->messages, message, reading->numbers, number) == 0 ? TAKEN : FAILED;
    else if (taken == TAKEN) /* the file may be truncated at any time: check it again */
        taken = !find_record(reading, entry, &record) ? NOT_THERE : keep_record(records, &record, entry->offset) == 0 ? TAKEN
                                                                                                                      : FAILED;
    Py_DECREF(message);
    return taken;
}

/* Add the record of an entry if its tag is wanted; map the segment that has it. */
static enum taken take_entry(struct reading *reading, const struct entry *entry, long long number)
{
    if (reading->tags != Py_None) {
        const int matches = code_matches(reading, entry->code);
        if (matches <= 0)
            return matches < 0 ? FAILED : NOT_WANTED;
    }
    struct segment *const segment = &reading->segment;
    if (entry->offset < 0)
        return NOT_THERE;
    if ((entry->offset < segment->start || entry->offset >= segment->end) && enter_segment(reading, entry->offset) != 0)
        return FAILED;
    const enum taken taken = add_record(reading, entry, number);
    if (taken == NOT_THERE && segment->view.obj == NULL && entry->size != MS_QUEUE_FILLER_SIZE) {
        reading->gone_from = segment->start;
        reading->gone_to = segment->end;
    }
    return taken;
}

/* Return whether the answer has no room for this entry's record; it has for the first one. */
static int is_full(const struct reading *reading, const struct entry *entry)
{
    const struct limits *const limits = &reading->limits;
    const int is_on_disk = entry->offset < limits->log_end - limits->in_memory_bytes;
    return reading->count > 0 &&
           (reading->count >= limits->messages_max ||
            reading->count >= (is_on_disk ? limits->count_on_disk : limits->count_in_memory) ||
            reading->total_bytes + entry->size > (is_on_disk ? limits->bytes_on_disk : limits->bytes_in_memory));
}

/* Take the records of `room` bytes of entries, the first of which has the queue offset `number`. Return how many entries were
 * passed, -1 with an exception. */
static Py_ssize_t take_entries(struct reading *reading, const uint8_t *bytes, Py_ssize_t room, long long number, enum outcome *status)
{
    Py_ssize_t passed = 0;
    for (; room >= MS_QUEUE_ENTRY_BYTES; passed++, bytes += MS_QUEUE_ENTRY_BYTES, room -= MS_QUEUE_ENTRY_BYTES) {
        const struct entry entry = {.offset = ms_get_i64(bytes), .size = ms_get_i32(bytes + 8), .code = ms_get_i64(bytes + 12)};
        if (entry.offset >= reading->gone_from && entry.offset < reading->gone_to)
            continue;
        if (is_full(reading, &entry))
            break;
        const enum taken taken = take_entry(reading, &entry, number + passed);
        if (taken == FAILED)
            return -1;
        if (taken == TAKEN) {
            reading->count++;
            reading->total_bytes += entry.size;
            *status = FOUND;
        } else if (reading->count == 0) {
            *status = taken == NOT_THERE ? WAS_REMOVED : NOTHING_MATCHED;
        }
    }
    return passed;
}

static PyObject *read_entries(PyObject *arguments, struct records *records)
{
    struct reading reading = {.records = records, .gone_to = -1};
    struct limits *const limits = &reading.limits;
    Py_buffer entries, codes;
    Py_ssize_t first, end;
    long long offset;
    if (!PyArg_ParseTuple(arguments, "y*nnLLUi(LLLLLL)y*OOOO:read_queue", &entries, &first, &end, &offset, &limits->messages_max,
                          &reading.topic_text, &reading.queue_id, &limits->log_end, &limits->in_memory_bytes,
                          &limits->bytes_in_memory, &limits->count_in_memory, &limits->bytes_on_disk, &limits->count_on_disk,
                          &codes, &reading.tags, &reading.find_segment, &reading.find_code, &reading.belongs))
        return NULL;
    PyObject *result = NULL;
    enum outcome status = NOTHING_MATCHED;
    Py_ssize_t passed = -1;
    reading.messages = PyList_New(0);
    reading.numbers = PyList_New(0);
    reading.topic = PyUnicode_AsUTF8AndSize(reading.topic_text, &reading.topic_bytes);
    reading.codes = codes.buf;
    reading.code_count = codes.len / (Py_ssize_t)sizeof *reading.codes;
    if (first < 0 || end > entries.len || codes.len % (Py_ssize_t)sizeof *reading.codes != 0)
        PyErr_SetString(PyExc_ValueError, "the entries do not lie in the file");
    else if (reading.messages != NULL && reading.numbers != NULL && reading.topic != NULL)
        passed = take_entries(&reading, (const uint8_t *)entries.buf + first, end - first, offset, &status);
    if (passed >= 0 && records == NULL)
        result = Py_BuildValue("iOOn", (int)status, reading.messages, reading.numbers, passed);
    else if (passed >= 0)
        result = Py_BuildValue("iy#LnL", (int)status, records->bytes == NULL ? "" : (const char *)records->bytes,
                               (Py_ssize_t)records->length, reading.count, passed, (long long)records->first_offset);
    Py_XDECREF(reading.messages);
    Py_XDECREF(reading.numbers);
    PyBuffer_Release(&reading.segment.view);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&entries);
    return result;
}

/* read_queue(entries, first, end, offset, messages_max, topic, queue_id, limits, codes, tags, find_segment, find_code, belongs)
 * -> (status, messages, their queue offsets, entries passed). See pyengine/_front.pyi. */
static PyObject *read_queue(PyObject *module, PyObject *arguments)
{
    return read_entries(arguments, NULL);
}

/* The same arguments -> (status, records, how many, entries passed, physical offset of the first). */
static PyObject *read_records(PyObject *module, PyObject *arguments)
{
    struct records records = {.first_offset = -1};
    PyObject *result = read_entries(arguments, &records);
    PyMem_Free(records.bytes);
    return result;
}

static PyMethodDef functions[] = {{"read_queue", read_queue, METH_VARARGS, NULL},
                                  {"read_records", read_records, METH_VARARGS, NULL},
                                  {NULL, NULL, 0, NULL}};

int read_queue_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
