/* pyengine._front: what a program calls for each message, in C.
 *
 * Who: the processes of producers and readers, under the GIL unless a function says otherwise. Built for the stable ABI of Python 3.11
 * and linked with nothing of pyengine._native: that module hands over ms_producer_calls. Blocks on: room and answers,
 * without the GIL, in slices, between which signal handlers run. After a crash: as csrc/producer.cdef.h says, for
 * everything here is memory of the process. Python is called only where something is out of the ordinary, never while
 * an entry is half written.
 */
#ifndef MS_FRONT_H
#define MS_FRONT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "producer.h"

/* ---- result.c: the answer to one put; pyengine.PutResult is a subclass. */
struct result_object {
    PyObject_HEAD struct ms_completion answer;
    PyObject *topic;
    PyObject *store_host;        /* bytes, as on disk */
    PyObject *reason;
    PyObject *msg_id;            /* of a batch; else empty, and worked out when it is asked for */
    long long queue_id;
    char is_indeterminate;
};
extern PyTypeObject *result_base;
int result_init(PyObject *module);
/* A PutResult of `type` for a message that is stored; NULL without memory. */
PyObject *result_of(PyObject *type, const struct ms_completion *answer, PyObject *topic, long long queue_id, PyObject *store_host);
/* The nine numbers of an answer, in the order of native.producer.ANSWER. */
PyObject *answer_tuple(const struct ms_completion *answer);

/* ---- lock.c: a producer's lock, taken by C and by `with`. */
extern PyTypeObject *lock_type;
int lock_init(PyObject *module);
PyObject *lock_new(void);
/* 0 once it is held; -1 with an exception: a signal handler's, or RuntimeError where this thread has it already. */
int lock_take(PyObject *lock);
/* Whether it is held now: without waiting. */
int lock_try(PyObject *lock);
void lock_release(PyObject *lock);

/* ---- session.c: one session and the futures that wait for its answers. */
struct pending_object;
struct session_object {
    PyObject_HEAD struct ms_producer *producer;             /* NULL once it ended: its memory may be gone */
    const struct ms_producer_calls *calls;
    PyObject *keeps;                          /* the Python object whose memory `producer` is */
    PyObject *owner;                          /* callables of the producer: see SessionFront */
    PyObject *result_type;
    PyObject *store_host;
    uint64_t first;                           /* no entry before it has a future that waits */
    struct pending_object **slots;            /* borrowed, by sequence */
    struct pending_object *answered;          /* borrowed, a list: answered, but not known to be kept */
    struct pending_object **answered_end;     /* where the next one belongs */
    Py_ssize_t waiting;                       /* entries in slots */
    int users;                                /* threads that look at its memory without the GIL */
};
extern PyTypeObject *session_type;
int session_init(PyObject *module);
/* Take what was answered. */
void session_harvest(struct session_object *session);
/* Without the GIL until `sequence` is answered, or the slice is over; -1 with an exception of a signal handler. */
int session_wait(struct session_object *session, uint64_t sequence, int64_t slice_ns);

/* ---- pending.c: the future of one put_async. */
enum pending_state { PENDING_WAITS,
                     PENDING_ANSWERED,
                     PENDING_RESOLVED,
                     PENDING_HANDED };
struct pending_object {
    PyObject_HEAD struct session_object *session;           /* until it is resolved */
    PyObject *topic;
    PyObject *result;                         /* RESOLVED: of the put; HANDED: the Future that will have it */
    long long queue_id;
    uint64_t sequence;
    struct ms_completion answer;
    int64_t submitted_ns, flush_deadline_ns, slave_deadline_ns;
    struct pending_object *next, **link;      /* in session->answered */
    int how;
    enum pending_state state;
};
extern PyTypeObject *pending_type;
int pending_init(PyObject *module);
struct pending_object *pending_new(void);
/* The entry just submitted is this future's. */
void pending_submitted(struct pending_object *pending, struct session_object *session, PyObject *topic, long long queue_id, int how);
/* Its answer is there; its place in the ring is not needed any more. */
void pending_take(struct pending_object *pending, const struct ms_completion *answer);
/* Its result comes from Python's thread of answers from now on; -1 with an exception. */
int pending_hand_over(struct pending_object *pending);

/* ---- producer.c: ProducerFront, the base of pyengine.client.producer.Producer. */
int producer_init(PyObject *module);

/* ---- message.c: what a reader makes of a record. */
struct ms_record;
extern PyTypeObject *message_type;           /* NULL until use_message() */
int message_init(PyObject *module);
/* The message of a whole record; `topic`: its topic as text, NULL to decode it. NULL with an exception. */
PyObject *message_of(const struct ms_record *record, PyObject *topic);
/* Its tags or None; NULL with an exception. */
PyObject *message_tags(PyObject *message);

/* ---- read_queue.c: the messages that a queue's entries lead to. */
int read_queue_init(PyObject *module);

/* Adds a type to the module; NULL with an exception. */
PyTypeObject *add_type(PyObject *module, PyType_Spec *spec, const char *name);

/* Py_SETREF, which the stable ABI has not: the old object goes last, for its end may run Python. */
static inline void replace(PyObject **place, PyObject *object)
{
    PyObject *old = *place;
    *place = object;
    Py_XDECREF(old);
}

/* A zeroed object of this type; NULL with an exception. */
static inline void *new_object(PyTypeObject *type)
{
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

/* The end of each dealloc: the object and its reference to its type. */
static inline void free_object(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

#endif
