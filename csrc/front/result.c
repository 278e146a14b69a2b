/* The result of one put: the numbers of the writer's answer; texts are made on request. */
#include "front.h"

PyTypeObject *result_base;
static PyObject *empty_text;

PyObject *result_of(PyObject *type, const struct ms_completion *answer, PyObject *topic, long long queue_id, PyObject *store_host)
{
    struct result_object *result = new_object((PyTypeObject *)type);
    if (result == NULL)
        return NULL;
    result->answer = *answer;
    result->topic = Py_NewRef(topic);
    result->store_host = Py_NewRef(store_host);
    result->reason = Py_NewRef(empty_text);
    result->msg_id = Py_NewRef(empty_text);
    result->queue_id = queue_id;
    return (PyObject *)result;
}

PyObject *answer_tuple(const struct ms_completion *answer)
{
    return Py_BuildValue("KLLLLIIII", (unsigned long long)answer->sequence, (long long)answer->physical_offset,
                         (long long)answer->end_offset, (long long)answer->queue_offset,
                         (long long)answer->store_timestamp_ms, answer->status, answer->detail, answer->count,
                         answer->size_bytes);
}

static PyObject *result_new(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    unsigned long long sequence;
    long long physical_offset, end_offset, queue_offset, store_timestamp_ms, queue_id;
    unsigned int status, detail, count, size_bytes;
    PyObject *topic, *store_host, *reason, *msg_id;
    int is_indeterminate;
    if (!PyArg_ParseTuple(arguments, "(KLLLLIIII)OLOOpO:PutResult", &sequence, &physical_offset, &end_offset, &queue_offset,
                          &store_timestamp_ms, &status, &detail, &count, &size_bytes, &topic, &queue_id, &store_host,
                          &reason, &is_indeterminate, &msg_id))
        return NULL;
    const struct ms_completion answer = {
        .sequence = sequence,
        .physical_offset = physical_offset,
        .end_offset = end_offset,
        .queue_offset = queue_offset,
        .store_timestamp_ms = store_timestamp_ms,
        .status = status,
        .detail = detail,
        .count = count,
        .size_bytes = size_bytes,
    };
    struct result_object *result = (struct result_object *)result_of((PyObject *)type, &answer, topic, queue_id, store_host);
    if (result == NULL)
        return NULL;
    replace(&result->reason, Py_NewRef(reason));
    replace(&result->msg_id, Py_NewRef(msg_id));
    result->is_indeterminate = (char)is_indeterminate;
    return (PyObject *)result;
}

static void result_dealloc(PyObject *object)
{
    struct result_object *result = (struct result_object *)object;
    Py_CLEAR(result->topic);
    Py_CLEAR(result->store_host);
    Py_CLEAR(result->reason);
    Py_CLEAR(result->msg_id);
    free_object(object);
}

static PyObject *result_answer(PyObject *object, void *unused)
{
    return answer_tuple(&((struct result_object *)object)->answer);
}

static PyObject *result_ok(PyObject *object, void *unused)
{
    return PyBool_FromLong(((struct result_object *)object)->answer.status == 0);
}

static PyObject *result_stored(PyObject *object, void *unused)
{
    return PyBool_FromLong(((struct result_object *)object)->answer.physical_offset >= 0);
}

static int result_bool(PyObject *object)
{
    return ((struct result_object *)object)->answer.status == 0;
}

#define AT(field) offsetof(struct result_object, field)
static PyMemberDef members[] = {
    {"physical_offset", T_LONGLONG, AT(answer.physical_offset), READONLY, "Where the record begins in the commit log, -1 if nothing was stored."},
    {"queue_offset", T_LONGLONG, AT(answer.queue_offset), READONLY, "The message's number in its queue, -1 if nothing was stored."},
    {"store_timestamp_ms", T_LONGLONG, AT(answer.store_timestamp_ms), READONLY, "The store time: the writer's clock, ms since 1970."},
    {"count", T_UINT, AT(answer.count), READONLY, "How many messages were stored; 0 for a put that was refused."},
    {"size_bytes", T_UINT, AT(answer.size_bytes), READONLY, "Of the record; of a batch, of all its records."},
    {"topic", T_OBJECT_EX, AT(topic), READONLY, "The topic of the put; of a delayed message the schedule's."},
    {"queue_id", T_LONGLONG, AT(queue_id), READONLY, "The queue of the put; of a delayed message the schedule's."},
    {"reason", T_OBJECT_EX, AT(reason), READONLY, "Why it is not PUT_OK and what to change, in one sentence; empty for PUT_OK."},
    {"indeterminate", T_BOOL, AT(is_indeterminate), READONLY, "Whether the message was submitted and it is not known if it is stored."},
    {"_status", T_UINT, AT(answer.status), READONLY, NULL},
    {"_store_host", T_OBJECT_EX, AT(store_host), READONLY, NULL},
    {"_msg_id", T_OBJECT_EX, AT(msg_id), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef getters[] = {
    {"ok", result_ok, NULL, "Whether all that was asked for is done: the status is PUT_OK.", NULL},
    {"stored", result_stored, NULL, "Whether the log has the message; with FLUSH_DISK_TIMEOUT and SLAVE_NOT_AVAILABLE, for example, it has.", NULL},
    {"_answer", result_answer, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, result_new},
    {Py_tp_dealloc, result_dealloc},
    {Py_tp_members, members},
    {Py_tp_getset, getters},
    {Py_nb_bool, result_bool},
    {0, NULL},
};

int result_init(PyObject *module)
{
    empty_text = PyUnicode_InternFromString("");
    return empty_text == NULL
               ? -1
               : add_type(module, &result_base, "pyengine._front.Result", sizeof(struct result_object), Py_TPFLAGS_BASETYPE, slots);
}
