/* One session of a producer: its beginning and its end (see front.h). */
#include "front.h"

#include <stdlib.h>
#include <time.h>

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

/* Hand the waiting futures to Python's thread in the order of their submission; afterwards this module does not read the
 * session's memory any more. The caller holds the producer's lock, so that no put is submitted meanwhile. */
static PyObject *session_end(PyObject *object, PyObject *none)
{
    struct session_object *session = (struct session_object *)object;
    if (session->producer == NULL)
        Py_RETURN_NONE;
    int failed = 0;
    do { /* repeat: during the hand-over another thread may take answers, some of which then wait for the disk */
        take_answers(session);
        while (session->answered != NULL && !failed)
            failed = pending_hand_over(session->answered) != 0;
        if (session->producer == NULL) /* forgotten: this is the child of a signal handler that forked in a hand-over */
            break;
        const uint64_t last = session->producer->sequence; /* all slots, also before `first`: see take_answers */
        for (uint64_t sequence = last < MS_COMPLETIONS ? 0 : last - MS_COMPLETIONS + 1; session->waiting > 0 && sequence <= last && !failed; sequence++) {
            struct pending_object *pending = session->slots[sequence % MS_COMPLETIONS];
            if (pending != NULL && pending->sequence == sequence)
                failed = pending_hand_over(pending) != 0;
        }
    } while (session->answered != NULL && !failed);
    if (failed)
        return NULL;
    if (session->producer == NULL)
        Py_RETURN_NONE;
    session->producer = NULL;
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

/* assign(future, topic, queue_id, how, submitted_ns): the last entry, which Python has submitted, is this future's, which no other
 * has begun. The caller holds the producer's lock. */
static PyObject *session_assign(PyObject *object, PyObject *arguments)
{
    struct session_object *session = (struct session_object *)object;
    PyObject *future, *topic;
    long long queue_id, submitted_ns;
    int how;
    if (!PyArg_ParseTuple(arguments, "O!ULiL:assign", pending_type, &future, &topic, &queue_id, &how, &submitted_ns))
        return NULL;
    struct pending_object *pending = (struct pending_object *)future;
    if (session->producer == NULL || pending->state != PENDING_HANDED || pending->session != NULL) {
        PyErr_SetString(PyExc_ValueError, "a future is assigned once, to an entry of an open session");
        return NULL;
    }
    pending_submitted(pending, session, topic, queue_id, how, submitted_ns);
    Py_RETURN_NONE;
}

static PyObject *session_count(PyObject *object, void *unused)
{
    return PyLong_FromSsize_t(((struct session_object *)object)->waiting);
}

static PyMethodDef methods[] = {
    {"end", session_end, METH_NOARGS, "Hand the waiting futures to Python's thread, and stop reading the session's memory."},
    {"take_answers", session_take_answers, METH_NOARGS, "Take the available answers, which frees their slots."},
    {"assign", session_assign, METH_VARARGS, "Give the last submitted entry to a new future."},
    {"forget", session_forget, METH_NOARGS, "Detach from the session in a forked child: the parent owns it. Results of waiting puts stay unknown here."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef getters[] = {{"waiting", session_count, NULL, "The number of futures whose answers were not taken.", NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot slots[] = {
    {Py_tp_new, session_new},
    {Py_tp_dealloc, session_dealloc},
    {Py_tp_traverse, session_traverse},
    {Py_tp_clear, session_clear},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {0, NULL},
};

int session_init(PyObject *module)
{
    session_type = add_type(module, "pyengine._front.SessionFront", sizeof(struct session_object), Py_TPFLAGS_HAVE_GC, slots);
    return session_type == NULL ? -1 : 0;
}
