/* pyengine._front: the calls that a program makes for each message, in C.
 *
 * Who: the processes of producers and readers, under the GIL unless a function says otherwise. It is built for the stable ABI
 * of Python 3.11 and not linked with pyengine._native, which passes it ms_producer_calls. Blocks on: room and answers,
 * without the GIL, in slices, between which signal handlers run. After a crash: as csrc/producer.cdef.h says, since all
 * objects here are memory of the process. It calls Python only for what is not ordinary, and not while an entry is
 * incomplete.
 */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h> /* before all others: it sets feature macros */
#include <structmember.h>

#include "base.h"
#include "producer.h"

/* ---- result.c: the answer to one put; pyengine.PutResult is a subclass. */
struct result_object {
    PyObject_HEAD
    struct ms_completion answer;
    PyObject *topic;
    PyObject *store_host;        /* bytes, as on disk */
    PyObject *reason;
    PyObject *msg_id;            /* of a batch; otherwise empty, and computed on request */
    long long queue_id;
    char is_indeterminate;
};
extern PyTypeObject *result_base;
int result_init(PyObject *module);
/* Return a PutResult of `type` for a stored message; NULL without memory. */
PyObject *result_of(PyObject *type, const struct ms_completion *answer, PyObject *topic, long long queue_id, PyObject *store_host);
/* Return the nine numbers of an answer, in the order of ANSWER in pyengine/native/session.py. */
PyObject *answer_tuple(const struct ms_completion *answer);

/* ---- lock.c: a producer's lock, taken by C and by `with`. */
extern PyTypeObject *lock_type;
int lock_init(PyObject *module);
PyObject *lock_new(PyTypeObject *type, PyObject *arguments, PyObject *names);
/* Take the lock: 0, or -1 with an exception: a signal handler's, or RuntimeError if this thread has the lock already. */
int lock_take(PyObject *lock);
/* Take the lock without waiting; return whether that worked. */
int lock_try(PyObject *lock);
void lock_release(PyObject *lock);

/* ---- session.c: one session, its beginning and its end. */
struct pending_object;
struct session_object {
    PyObject_HEAD
    struct ms_producer *producer;             /* NULL after the session's end, when its memory may be unmapped */
    const struct ms_producer_calls *calls;
    PyObject *producer_owner;                 /* the Python object whose memory `producer` is */
    PyObject *owner;                          /* callables of the producer: see SessionFront */
    PyObject *result_type;
    PyObject *store_host;
    uint64_t first;                           /* the first entry that may have a waiting future */
    struct pending_object **slots;            /* borrowed, by sequence */
    struct pending_object *answered;          /* borrowed, a list: answered, but not yet known to be durable and confirmed */
    struct pending_object **answered_end;     /* where to append the next one */
    Py_ssize_t waiting;                       /* entries in slots */
    long long give_up_ns;                     /* when its end waits no longer, on the monotonic clock; 0: it does not end yet */
    long long patience_ns;                    /* so long after each answer its end goes on */
    int64_t look_ns;                          /* when to look next whether the engine was replaced */
    int users;                                /* threads that read its memory without the GIL */
};
extern PyTypeObject *session_type;
int session_init(PyObject *module);

/* ---- pending.c: the answers of a session, and the future of one put. */
enum pending_state { PENDING_QUEUED,          /* not submitted yet */
                     PENDING_WAITS,
                     PENDING_ANSWERED,        /* it may wait for the disk and for slaves */
                     PENDING_RESOLVED };
/* What the result of a put says beside the answer. */
struct put {
    PyObject *topic;
    PyObject *context;                        /* Python's PutContext, if it is not as plain as these; otherwise NULL or None */
    long long queue_id;
    int64_t submitted_ns;
    int kind;                                 /* MS_ENTRY_* */
    int how;                                  /* what it waits for: MS_PUT_DURABLE, MS_PUT_CONFIRMED */
};
struct pending_object {
    PyObject_HEAD
    struct session_object *session;           /* while it waits or is answered */
    PyObject *topic, *context;
    PyObject *result;                         /* RESOLVED */
    long long queue_id;
    uint64_t sequence;
    struct ms_completion answer;
    int64_t submitted_ns, target_before, flush_deadline_ns, slave_deadline_ns;
    struct pending_object *next, **link;      /* in session->answered */
    int kind, how;
    char raises;                              /* result() of a put that is not PUT_OK raises PutError */
    char is_refused;                          /* RESOLVED, and not PUT_OK */
    char is_watched;                          /* it has the fields of a Future, which the thread of answers ends */
    char has_left;                            /* the session, when it was deleted; it may come back to life */
    enum pending_state state;
};
extern PyTypeObject *pending_type, *future_class;
int pending_init(PyObject *module);
/* Assign a submitted entry to this future. The producer's lock is held. */
void pending_submitted(struct pending_object *pending, struct session_object *session, const struct put *put, uint64_t sequence);
/* Return Python's result of a put that ended with `code`; `answer` NULL: without an answer. */
PyObject *outcome_of(struct session_object *session, int code, const struct ms_completion *answer, const struct put *put);
/* Wait for the result of a put, for its answer until the deadline; then an indeterminate one. */
PyObject *pending_await(struct pending_object *pending, int64_t deadline_ns);
/* Wait for the result until the session gives up, which is later after an answer; -1 with an exception. */
int pending_finish(struct pending_object *pending);
/* Give the futures of the session the answers that have arrived, and free the answers' slots. */
void take_answers(struct session_object *session);
/* Wait without the GIL until `sequence` is answered or the slice is over; `target_before` and `how` as ms_producer_wait_answer. -1
 * with an exception of a signal handler. */
int wait_acked(struct session_object *session, uint64_t sequence, int64_t target_before, int how, int64_t slice_ns, int *code);

/* ---- producer_front.c: ProducerFront, the base of pyengine.client.producer.Producer, and the turns of its topics. */
int producer_init(PyObject *module);

/* ---- message.c: the message of a record. */
struct ms_record;
extern PyTypeObject *message_type;           /* NULL until use_message() */
int message_init(PyObject *module);
/* Return the message of a whole record; `topic`: its topic as text, NULL to decode it. NULL with an exception. */
PyObject *message_of(const struct ms_record *record, PyObject *topic);
/* Return its tags or None; NULL with an exception. */
PyObject *message_tags(PyObject *message, void *unused);

/* ---- read_queue.c: the messages of a queue's entries. */
int read_queue_init(PyObject *module);

/* Make a type of this full name and add it to the module; -1 with an exception. */
static inline int add_type(PyObject *module, PyTypeObject **to, const char *name, size_t bytes, unsigned int flags, PyType_Slot *slots)
{
    PyType_Spec spec = {.name = name, .basicsize = (int)bytes, .flags = Py_TPFLAGS_DEFAULT | flags, .slots = slots};
    *to = (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
    return *to == NULL ? -1 : PyModule_AddObjectRef(module, strrchr(name, '.') + 1, (PyObject *)*to);
}

/* Py_SETREF, which the stable ABI lacks: release the old object last, because its end may run Python. */
static inline void replace(PyObject **place, PyObject *object)
{
    PyObject *old = *place;
    *place = object;
    Py_XDECREF(old);
}

/* Return a zeroed object of this type; NULL with an exception. */
static inline void *new_object(PyTypeObject *type)
{
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

/* Free the object and its reference to its type, at the end of each dealloc. */
static inline void free_object(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}
