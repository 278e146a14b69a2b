/* One session of a producer: its beginning and its end (see front.h). */
#include "front.h"

#include <stdlib.h>

#define END_POLL_NS 1000000

PyTypeObject *session_type;

/* SessionFront(producer, calls, producer_owner, owner, result_type, store_host) */
static PyObject *session_new(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    unsigned long long producer, calls;
    PyObject *producer_owner, *owner, *result_type, *store_host;
    if (!PyArg_ParseTuple(arguments, "KKOOO!S:SessionFront", &producer, &calls, &producer_owner, &owner, &PyType_Type, &result_type,
                          &store_host))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)result_type, result_base)) {
        PyErr_SetString(PyExc_TypeError, "results are made of a subclass of Result");
        return NULL;
    }
    const struct ms_producer_calls *found = (const struct ms_producer_calls *)(uintptr_t)calls;
    if (found == NULL || found->version != MS_PRODUCER_CALLS_BUILD) {
        PyErr_SetString(PyExc_ImportError, "pyengine._front and pyengine._native are of two builds: build both again");
        return NULL;
    }
    struct session_object *session = new_object(type);
    if (session == NULL)
        return NULL;
    session->slots = calloc(MS_COMPLETIONS, sizeof *session->slots);
    if (session->slots == NULL) {
        Py_DECREF((PyObject *)session);
        return PyErr_NoMemory();
    }
    session->producer = (struct ms_producer *)(uintptr_t)producer;
    session->calls = found;
    session->producer_owner = Py_NewRef(producer_owner);
    session->owner = Py_NewRef(owner);
    session->result_type = Py_NewRef(result_type);
    session->store_host = Py_NewRef(store_host);
    session->first = session->producer->sequence + 1;
    session->answered_end = &session->answered;
    return (PyObject *)session;
}

static int session_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct session_object *session = (struct session_object *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(session->producer_owner);
    Py_VISIT(session->owner);
    Py_VISIT(session->result_type);
    return 0;
}

static int session_clear(PyObject *object)
{
    struct session_object *session = (struct session_object *)object;
    Py_CLEAR(session->owner);
    return 0;
}

static void session_dealloc(PyObject *object)
{
    struct session_object *session = (struct session_object *)object;
    PyObject_GC_UnTrack(object);
    Py_CLEAR(session->producer_owner);
    Py_CLEAR(session->owner);
    Py_CLEAR(session->result_type);
    Py_CLEAR(session->store_host);
    free(session->slots);
    free_object(object);
}

/* Wait for the waiting futures until give_up_ns, which each answer moves on by patience_ns, and resolve them; afterwards this module does
 * not read the session's memory any more. No put of it is submitted meanwhile. */
static PyObject *session_end(PyObject *object, PyObject *none)
{
    struct session_object *session = (struct session_object *)object;
    int failed = 0;
    while (!failed && session->producer != NULL && (session->waiting > 0 || session->answered != NULL)) {
        const uint64_t last = session->producer->sequence; /* all slots, also before `first`: see take_answers */
        for (uint64_t sequence = last < MS_COMPLETIONS ? 0 : last - MS_COMPLETIONS + 1;
             session->waiting > 0 && sequence <= last && !failed && session->producer != NULL; sequence++) {
            struct pending_object *pending = session->slots[sequence % MS_COMPLETIONS];
            if (pending != NULL)
                failed = pending_finish(pending) != 0;
        }
        while (session->answered != NULL && !failed && session->producer != NULL)
            failed = pending_finish(session->answered) != 0;
    }
    if (failed)
        return NULL;
    session->producer = NULL; /* or it is so already: in the child of a signal handler that forked here */
    while (session->users > 0) { /* they read `producer` again after their slice */
        const struct timespec interval = {.tv_nsec = END_POLL_NS};
        Py_BEGIN_ALLOW_THREADS
        nanosleep(&interval, NULL);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyObject *session_forget(PyObject *object, PyObject *none)
{
    ((struct session_object *)object)->producer = NULL;
    Py_RETURN_NONE;
}

static PyObject *session_take_answers(PyObject *object, PyObject *none)
{
    take_answers((struct session_object *)object);
    Py_RETURN_NONE;
}

/* assign(future, sequence, kind, topic, queue_id, how, submitted_ns, context): the entry `sequence`, which Python has submitted, is this
 * future's. The caller holds the producer's lock. */
static PyObject *session_assign(PyObject *object, PyObject *arguments)
{
    struct session_object *session = (struct session_object *)object;
    PyObject *future;
    unsigned long long sequence;
    long long submitted_ns;
    struct put put;
    if (!PyArg_ParseTuple(arguments, "O!KiULiLO:assign", pending_type, &future, &sequence, &put.kind, &put.topic, &put.queue_id, &put.how,
                          &submitted_ns, &put.context))
        return NULL;
    put.submitted_ns = submitted_ns;
    struct pending_object *pending = (struct pending_object *)future;
    if (session->producer == NULL || pending->state != PENDING_QUEUED) {
        PyErr_SetString(PyExc_ValueError, "a future is assigned once, to an entry of an open session");
        return NULL;
    }
    pending_submitted(pending, session, &put, sequence);
    Py_RETURN_NONE;
}

static PyObject *session_count(PyObject *object, void *unused)
{
    return PyLong_FromSsize_t(((struct session_object *)object)->waiting);
}

static PyObject *session_has_open(PyObject *object, void *unused)
{
    const struct session_object *session = (struct session_object *)object;
    return PyBool_FromLong(session->waiting > 0 || session->answered != NULL);
}

static PyMethodDef methods[] = {
    {"end", session_end, METH_NOARGS, "Wait for the waiting futures until give_up_ns, resolve them, and stop reading the session's memory."},
    {"take_answers", session_take_answers, METH_NOARGS, "Take the available answers, which frees their slots."},
    {"assign", session_assign, METH_VARARGS, "Give a submitted entry to a future."},
    {"forget", session_forget, METH_NOARGS, "Detach from the session in a forked child: the parent owns it. Results of waiting puts stay unknown here."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef members[] = {
    {"give_up_ns", T_LONGLONG, offsetof(struct session_object, give_up_ns), 0, "When its futures wait no longer, on the monotonic clock; 0: it goes on."},
    {"patience_ns", T_LONGLONG, offsetof(struct session_object, patience_ns), 0, "So long after each answer end() goes on."},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef getters[] = {
    {"waiting", session_count, NULL, "The number of futures whose answers were not taken.", NULL},
    {"has_open", session_has_open, NULL, "Whether a future may still be without a result.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, session_new},
    {Py_tp_dealloc, session_dealloc},
    {Py_tp_traverse, session_traverse},
    {Py_tp_clear, session_clear},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {Py_tp_members, members},
    {0, NULL},
};

int session_init(PyObject *module)
{
    return add_type(module, &session_type, "pyengine._front.SessionFront", sizeof(struct session_object), Py_TPFLAGS_HAVE_GC, slots);
}
