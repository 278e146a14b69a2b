/* A message that was read: a subclass of pyengine.Message, which only type() distinguishes from it.
 *
 * Who: readers of queues (read_queue.c), under the GIL. Blocks on: nothing. After a crash: nothing remains. A message is a
 * copy, so that later changes of the file do not change it: numbers and hosts in a struct, body and properties in objects.
 * Hosts, numbers and the table of properties become objects on request. Decoding agrees with
 * pyengine.formats.record.decode_record, which is the reference.
 */
#include "front.h"

#include "property.h"
#include "record.h"

struct fields {
    PyObject *topic, *body, *raw_properties;
    PyObject *properties;            /* the table, NULL until it is requested */
    long long queue_offset, physical_offset, born_timestamp_ms, store_timestamp_ms, prepared_transaction_offset;
    int queue_id, size_bytes, flag, sys_flag, reconsume_times, body_crc, delivery_count;
    unsigned char born_host_bytes, store_host_bytes;
    uint8_t born_host[MS_HOST_BYTES_MAX], store_host[MS_HOST_BYTES_MAX];
};

PyTypeObject *message_type;
static PyObject *message_class, *match_args, *decode_host, *name_tags, *no_text;
static allocfunc allocate;
static freefunc release;
static size_t fields_at;             /* after the fields of Message, which stay empty */

static struct fields *fields_of(PyObject *message)
{
    return (struct fields *)((char *)message + fields_at);
}

/* Decode a copy: CPython reads the bytes twice, and if the file changed meanwhile the text would be ASCII by its header and not
 * by its content. */
static PyObject *text_of(const uint8_t *bytes, int32_t length)
{
    char copy[MS_PROPERTIES_BYTES_MAX];
    memcpy(copy, bytes, (size_t)length);
    return PyUnicode_DecodeUTF8(copy, length, "replace");
}

PyObject *message_of(const struct ms_record *record, PyObject *topic)
{
    PyObject *message = allocate(message_type, 0);
    if (message == NULL)
        return NULL;
    PyObject_GC_UnTrack(message); /* it refers only to bytes and text until its table is requested */
    struct fields *fields = fields_of(message);
    const uint8_t *const start = record->start, *const tail = record->body - 16;
    fields->queue_offset = ms_record_queue_offset(record);
    fields->physical_offset = ms_record_physical_offset(record);
    fields->born_timestamp_ms = ms_get_i64(start + MS_AT_BORN_TIMESTAMP);
    fields->store_timestamp_ms = record->store_timestamp_ms;
    fields->prepared_transaction_offset = ms_get_i64(tail + 4);
    fields->queue_id = ms_record_queue_id(record);
    fields->size_bytes = record->size_bytes;
    fields->flag = ms_get_i32(start + MS_AT_FLAG);
    fields->sys_flag = record->sys_flag;
    fields->reconsume_times = ms_get_i32(tail);
    fields->body_crc = ms_get_i32(start + MS_AT_BODY_CRC);
    fields->delivery_count = 1;
    fields->born_host_bytes = (unsigned char)record->born_host_bytes;
    fields->store_host_bytes = (unsigned char)record->store_host_bytes;
    memcpy(fields->born_host, start + MS_AT_BORN_HOST, (size_t)record->born_host_bytes);
    memcpy(fields->store_host, tail - record->store_host_bytes, (size_t)record->store_host_bytes);
    fields->topic = topic != NULL ? Py_NewRef(topic) : text_of(record->topic, record->topic_bytes);
    fields->body = PyBytes_FromStringAndSize((const char *)record->body, record->body_bytes);
    fields->raw_properties =
        record->properties_bytes == 0 ? Py_NewRef(no_text) : text_of(record->properties, record->properties_bytes);
    if (fields->topic == NULL || fields->body == NULL || fields->raw_properties == NULL) {
        Py_DECREF(message);
        return NULL;
    }
    return message;
}

/* Decode as pyengine.formats.record.decode_properties. */
static PyObject *decoded(PyObject *text)
{
    Py_ssize_t length;
    const char *at = PyUnicode_AsUTF8AndSize(text, &length);
    PyObject *table = at == NULL ? NULL : PyDict_New();
    if (table == NULL)
        return NULL;
    struct ms_text rest = {(const uint8_t *)at, length}, name, value;
    while (ms_property_next(&rest, &name, &value)) {
        PyObject *key = PyUnicode_FromStringAndSize((const char *)name.at, name.bytes);
        PyObject *text_of_key = key == NULL ? NULL : PyUnicode_FromStringAndSize((const char *)value.at, value.bytes);
        const int failed = text_of_key == NULL || PyDict_SetItem(table, key, text_of_key) != 0;
        Py_XDECREF(key);
        Py_XDECREF(text_of_key);
        if (failed) {
            Py_DECREF(table);
            return NULL;
        }
    }
    return table;
}

static PyObject *get_properties(PyObject *message, void *unused)
{
    struct fields *fields = fields_of(message);
    if (fields->properties == NULL) {
        PyObject *table = decoded(fields->raw_properties);
        if (table == NULL)
            return NULL;
        if (fields->properties != NULL) { /* another thread made it while the garbage collector ran in decoded() (Python 3.11) */
            Py_DECREF(table);
        } else {
            fields->properties = table;
            if (!PyObject_GC_IsTracked(message))
                PyObject_GC_Track(message); /* a program may store any object in the table */
        }
    }
    return Py_NewRef(fields->properties);
}

/* Return what Message keeps: the table, or None before it is requested. */
static PyObject *get_kept_properties(PyObject *message, void *unused)
{
    PyObject *table = fields_of(message)->properties;
    return Py_NewRef(table == NULL ? Py_None : table);
}

PyObject *message_tags(PyObject *message, void *unused)
{
    PyObject *table = get_properties(message, NULL);
    if (table == NULL)
        return NULL;
    PyObject *tags = PyDict_GetItemWithError(table, name_tags);
    if (tags == NULL && !PyErr_Occurred())
        tags = Py_None;
    Py_XINCREF(tags);
    Py_DECREF(table);
    return tags;
}

static PyObject *get_host(PyObject *message, void *is_store_host)
{
    const struct fields *fields = fields_of(message);
    PyObject *packed = is_store_host != NULL ? PyBytes_FromStringAndSize((const char *)fields->store_host, fields->store_host_bytes)
                                             : PyBytes_FromStringAndSize((const char *)fields->born_host, fields->born_host_bytes);
    PyObject *text = packed == NULL ? NULL : PyObject_CallFunctionObjArgs(decode_host, packed, NULL);
    Py_XDECREF(packed);
    return text;
}

/* Return Message as __class__, for equality, dataclasses.replace and repr. */
static PyObject *get_class(PyObject *message, void *unused)
{
    return Py_NewRef(message_class);
}

static PyObject *message_new(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    return PyObject_Call(message_class, arguments, names);
}

static PyObject *message_reduce(PyObject *message, PyObject *unused)
{
    const Py_ssize_t count = PyTuple_Size(match_args);
    PyObject *values = PyTuple_New(count);
    for (Py_ssize_t i = 0; values != NULL && i < count; i++) {
        PyObject *value = PyObject_GetAttr(message, PyTuple_GetItem(match_args, i));
        if (value == NULL || PyTuple_SetItem(values, i, value) != 0)
            Py_CLEAR(values);
    }
    return values == NULL ? NULL : Py_BuildValue("ON", message_class, values);
}

static int message_traverse(PyObject *message, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(message));
    Py_VISIT(fields_of(message)->properties);
    return 0;
}

static int message_clear(PyObject *message)
{
    Py_CLEAR(fields_of(message)->properties);
    return 0;
}

static void message_dealloc(PyObject *message)
{
    PyTypeObject *type = Py_TYPE(message);
    struct fields *fields = fields_of(message);
    PyObject_GC_UnTrack(message);
    Py_CLEAR(fields->topic);
    Py_CLEAR(fields->body);
    Py_CLEAR(fields->raw_properties);
    Py_CLEAR(fields->properties);
    release(message);
    Py_DECREF(type);
}

#define AT(field) offsetof(struct fields, field)
static const PyMemberDef relative_members[] = {
    {"topic", T_OBJECT_EX, AT(topic), READONLY, NULL},
    {"body", T_OBJECT_EX, AT(body), READONLY, NULL},
    {"queue_id", T_INT, AT(queue_id), READONLY, NULL},
    {"queue_offset", T_LONGLONG, AT(queue_offset), READONLY, NULL},
    {"physical_offset", T_LONGLONG, AT(physical_offset), READONLY, NULL},
    {"size_bytes", T_INT, AT(size_bytes), READONLY, NULL},
    {"raw_properties", T_OBJECT_EX, AT(raw_properties), READONLY, NULL},
    {"flag", T_INT, AT(flag), READONLY, NULL},
    {"sys_flag", T_INT, AT(sys_flag), READONLY, NULL},
    {"born_timestamp_ms", T_LONGLONG, AT(born_timestamp_ms), READONLY, NULL},
    {"store_timestamp_ms", T_LONGLONG, AT(store_timestamp_ms), READONLY, NULL},
    {"reconsume_times", T_INT, AT(reconsume_times), READONLY, NULL},
    {"prepared_transaction_offset", T_LONGLONG, AT(prepared_transaction_offset), READONLY, NULL},
    {"body_crc", T_INT, AT(body_crc), READONLY, NULL},
    {"delivery_count", T_INT, AT(delivery_count), READONLY, NULL},
};
#define MEMBERS (sizeof relative_members / sizeof *relative_members)
static PyMemberDef members[MEMBERS + 1]; /* counted from the object's beginning */

static PyGetSetDef getters[] = {
    {"born_host", get_host, NULL, NULL, NULL},
    {"store_host", get_host, NULL, NULL, &decode_host}, /* any but NULL */
    {"properties", get_properties, NULL, NULL, NULL},
    {"tags", message_tags, NULL, NULL, NULL},
    {"_properties", get_kept_properties, NULL, NULL, NULL},
    {"__class__", get_class, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {{"__reduce__", message_reduce, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_new, message_new},
    {Py_tp_dealloc, message_dealloc},
    {Py_tp_traverse, message_traverse},
    {Py_tp_clear, message_clear},
    {Py_tp_members, members},
    {Py_tp_getset, getters},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "pyengine.formats.record.Message",
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

/* use_message(Message, decode_host): make read messages a subclass of this Message from now on. */
static PyObject *use_message(PyObject *module, PyObject *arguments)
{
    PyObject *class, *decode;
    if (!PyArg_ParseTuple(arguments, "O!O:use_message", &PyType_Type, &class, &decode))
        return NULL;
    if (message_type != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the class of messages is chosen already");
        return NULL;
    }
    PyObject *size = PyObject_GetAttrString(class, "__basicsize__");
    const long base_bytes = size == NULL ? -1 : PyLong_AsLong(size);
    Py_XDECREF(size);
    PyObject *names = base_bytes < 0 ? NULL : PyObject_GetAttrString(class, "__match_args__");
    PyObject *bases = names == NULL ? NULL : PyTuple_Pack(1, class);
    if (bases == NULL) {
        Py_XDECREF(names);
        return NULL;
    }
    fields_at = ((size_t)base_bytes + _Alignof(struct fields) - 1) & ~(_Alignof(struct fields) - 1);
    spec.basicsize = (int)(fields_at + sizeof(struct fields));
    for (size_t i = 0; i < MEMBERS; i++) {
        members[i] = relative_members[i];
        members[i].offset += (Py_ssize_t)fields_at;
    }
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, bases);
    Py_DECREF(bases);
    if (type == NULL) {
        Py_DECREF(names);
        return NULL;
    }
    allocate = (allocfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_alloc);
    release = (freefunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_free);
    message_class = Py_NewRef(class);
    decode_host = Py_NewRef(decode);
    match_args = names;
    message_type = (PyTypeObject *)type;
    Py_RETURN_NONE;
}
static PyMethodDef functions[] = {{"use_message", use_message, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

int message_init(PyObject *module)
{
    name_tags = PyUnicode_InternFromString("TAGS");
    no_text = PyUnicode_InternFromString("");
    return name_tags == NULL || no_text == NULL || PyModule_AddFunctions(module, functions) != 0 ? -1 : 0;
}
