/* The future of one put_async: it takes its answer itself if the program waits for it soon, otherwise the thread of answers
 * does. */
#include "front.h"

#include <math.h>
#include <stddef.h>

#include "atomics.h"
#include "futex.h"

#define SLICE_NS 50000000
/* How long a future waits for its result itself, before the thread of answers takes over. */
#define OWN_WAIT_NS_MAX 250000000
#define FOR_EVER_NS INT64_MAX

PyTypeObject *pending_type;
static PyTypeObject *future_class; /* PutFuture: of this and of concurrent.futures.Future */
/* The methods of a PutFuture once it is an ordinary Future. */
static PyObject *future_result, *future_exception, *future_done, *future_running, *future_add_done_callback, *future_settled, *future_error;

/* Make one, which is an ordinary Future until it is submitted. */
static PyObject *pending_make(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    struct pending_object *pending = new_object(type);
    if (pending != NULL)
        pending->state = PENDING_HANDED; /* it has no session */
    return (PyObject *)pending;
}

struct pending_object *pending_new(void)
{
    return (struct pending_object *)pending_make(future_class, NULL, NULL);
}

void pending_submitted(struct pending_object *pending, struct session_object *session, PyObject *topic, long long queue_id, int how,
                       int64_t submitted_ns)
{
    struct ms_producer *producer = session->producer;
    pending->session = (struct session_object *)Py_NewRef((PyObject *)session);
    pending->topic = Py_NewRef(topic);
    pending->queue_id = queue_id;
    pending->how = how;
    pending->submitted_ns = submitted_ns;
    pending->sequence = producer->sequence;
    pending->state = PENDING_WAITS;
    producer->unclaimed = 0; /* this object finishes its answer */
    if (session->waiting == 0)
        session->first = pending->sequence;
    struct pending_object **slot = &session->slots[pending->sequence % MS_COMPLETIONS];
    session->waiting += *slot == NULL; /* a slot is still used if an exception ended a claim early; that future finds no answer */
    *slot = pending;
}

static void leave_list(struct pending_object *pending)
{
    if (pending->link != NULL) {
        *pending->link = pending->next;
        if (pending->next != NULL)
            pending->next->link = pending->link;
        else
            pending->session->answered_end = pending->link;
        pending->link = NULL;
    }
}

static void answer_one(struct pending_object *pending, const struct ms_completion *answer)
{
    struct session_object *session = pending->session;
    pending->answer = *answer;
    pending->state = PENDING_ANSWERED;
    if (pending->how == 0 || answer->status != 0)
        return;
    const int64_t stored_ns = session->calls->stored_ns(pending->submitted_ns, answer->store_timestamp_ms);
    pending->flush_deadline_ns = stored_ns + session->producer->flush_timeout_ns;
    pending->slave_deadline_ns = stored_ns + session->producer->slave_timeout_ns;
    *session->answered_end = pending; /* in order of submission */
    pending->link = session->answered_end;
    pending->next = NULL;
    session->answered_end = &pending->next;
}

void take_answers(struct session_object *session)
{
    struct ms_producer *producer = session->producer;
    if (producer == NULL || session->waiting == 0)
        return;
    uint64_t acked = ms_load_acquire(&producer->session->acked);
    const uint64_t submitted = ms_load_relaxed(&producer->sequence); /* another thread may submit through cffi: see pass_over() in csrc/producer.c */
    if (acked > submitted)                                           /* shared memory: bound it by the own slots */
        acked = submitted;
    for (; session->first <= acked && session->waiting > 0; session->first++) {
        struct pending_object **slot = &session->slots[session->first % MS_COMPLETIONS];
        struct pending_object *pending = *slot;
        if (pending == NULL || pending->sequence != session->first)
            continue;
        const struct ms_completion answer = producer->session->completion[session->first % MS_COMPLETIONS];
        if (answer.sequence != session->first)
            continue; /* it stays: the thread of answers reports an unknown outcome */
        *slot = NULL;
        session->waiting--;
        session->calls->finish(producer, session->first);
        answer_one(pending, &answer);
    }
}

int wait_acked(struct session_object *session, uint64_t sequence, int64_t slice_ns)
{
    struct ms_producer *producer = session->producer;
    struct ms_completion unused;
    session->users++;
    Py_BEGIN_ALLOW_THREADS
    session->calls->wait_acked(producer, sequence, ms_monotonic_ns() + slice_ns, &unused);
    Py_END_ALLOW_THREADS
    session->users--;
    return PyErr_CheckSignals();
}

/* Remove it from the session. */
static void leave_session(struct pending_object *pending)
{
    struct session_object *session = pending->session;
    if (session == NULL)
        return;
    if (pending->state == PENDING_WAITS && session->slots[pending->sequence % MS_COMPLETIONS] == pending) {
        session->slots[pending->sequence % MS_COMPLETIONS] = NULL;
        session->waiting--;
    }
    leave_list(pending);
}

static void resolve(struct pending_object *pending, PyObject *result, int is_refused)
{
    leave_session(pending);
    replace(&pending->result, result);
    pending->is_refused = (char)is_refused;
    pending->state = PENDING_RESOLVED;
    Py_CLEAR(pending->session);
    Py_CLEAR(pending->topic);
}

/* Set the result of an answer with `code` (0, or why it is not durable or confirmed); Python makes it unless it is PUT_OK. */
static int resolve_answered(struct pending_object *pending, int code)
{
    struct session_object *session = pending->session;
    const int is_refused = code != 0 || pending->answer.status != 0;
    PyObject *result;
    if (!is_refused) {
        result = result_of(session->result_type, &pending->answer, pending->topic, pending->queue_id, session->store_host);
    } else {
        PyObject *answer = answer_tuple(&pending->answer);
        result = answer == NULL ? NULL : PyObject_CallMethod(session->owner, "outcome", "iOOLi", code, answer, pending->topic, pending->queue_id, pending->how);
        Py_XDECREF(answer);
    }
    if (result == NULL)
        return -1;
    if (pending->state == PENDING_ANSWERED)
        resolve(pending, result, is_refused);
    else
        Py_DECREF(result);
    return 0;
}

/* Give it the fields of a Future, without running Python. */
static int become_handed(struct pending_object *pending, PyObject *own_fields, PyObject *fields, PyObject *put, PyObject *entry)
{
    if (PyDict_Update(own_fields, fields) != 0)
        return -1;
    if (put != NULL) {
        PyObject *done = PyObject_CallFunctionObjArgs(put, entry, NULL);
        if (done == NULL)
            return -1;
        Py_DECREF(done);
    }
    leave_session(pending);
    pending->state = PENDING_HANDED;
    return 0;
}

/* Resolve a put of the parent process's session (session_forget), whose outcome is unknown here. */
static int resolve_lost(struct pending_object *pending)
{
    PyObject *session = Py_NewRef((PyObject *)pending->session);
    PyObject *result = PyObject_CallMethod(pending->session->owner, "lost", "OL", pending->topic, pending->queue_id);
    if (result != NULL && (pending->state == PENDING_WAITS || pending->state == PENDING_ANSWERED))
        resolve(pending, result, 1);
    else
        Py_XDECREF(result);
    Py_DECREF(session);
    return result == NULL ? -1 : 0;
}

/* Resolve a future whose session has ended. If another thread has taken its answer before, a put that waits for nothing else
 * is complete. */
static int resolve_without_session(struct pending_object *pending)
{
    if (pending->state != PENDING_ANSWERED || (pending->how != 0 && pending->answer.status == 0))
        return resolve_lost(pending);
    PyObject *session = Py_NewRef((PyObject *)pending->session);
    int failed = resolve_answered(pending, 0);
    Py_DECREF(session);
    return failed;
}

/* Hand the future over once, in its current state. Use what Python returns only if the state is still the same, since another
 * thread or a signal handler may have changed it meanwhile. Until then the future does not change, whatever is raised. */
static int hand_over_once(struct pending_object *pending)
{
    struct session_object *session = (struct session_object *)Py_NewRef((PyObject *)pending->session);
    PyObject *topic = Py_NewRef(pending->topic);
    const enum pending_state before = pending->state;
    PyObject *answer = before == PENDING_ANSWERED ? answer_tuple(&pending->answer) : Py_NewRef(Py_None);
    PyObject *ready = answer == NULL ? NULL
                                     : PyObject_CallMethod(session->owner, "hand_over", "OKOOLiL", (PyObject *)pending,
                                                           (unsigned long long)pending->sequence, answer, topic, pending->queue_id,
                                                           pending->how, (long long)pending->submitted_ns);
    PyObject *own_fields = ready == NULL ? NULL : PyObject_GenericGetDict((PyObject *)pending, NULL);
    PyObject *put, *entry, *fields;
    int failed = own_fields == NULL || !PyArg_ParseTuple(ready, "OOO!:hand_over", &put, &entry, &PyDict_Type, &fields);
    if (!failed && pending->state == before && session->producer != NULL) {
        failed = become_handed(pending, own_fields, fields, put, entry) != 0;
        if (!failed) {
            Py_CLEAR(pending->session);
            Py_CLEAR(pending->topic);
        }
    }
    Py_XDECREF(own_fields);
    Py_XDECREF(ready);
    Py_XDECREF(answer);
    Py_DECREF(topic);
    Py_DECREF((PyObject *)session);
    return failed ? -1 : 0;
}

int pending_hand_over(struct pending_object *pending)
{
    int failed = 0;
    Py_INCREF((PyObject *)pending); /* the thread of answers may finish with it before this returns */
    while (!failed && (pending->state == PENDING_WAITS || pending->state == PENDING_ANSWERED))
        failed = (pending->session->producer == NULL ? resolve_without_session(pending) : hand_over_once(pending)) != 0;
    Py_DECREF((PyObject *)pending);
    return failed ? -1 : 0;
}

/* Return whether the wait for the disk and for slaves is over: 1 and *code, or 0. It waits for a slice at most; without one it
 * only looks, and keeps the GIL. */
static int is_persisted(struct pending_object *pending, int64_t slice_ns, int *code)
{
    struct session_object *session = pending->session;
    const struct ms_producer_calls *calls = session->calls;
    struct ms_producer *producer = session->producer;
    const int64_t end_offset = pending->answer.end_offset, flush_ns = pending->flush_deadline_ns, slave_ns = pending->slave_deadline_ns;
    const int how = pending->how;
    const int64_t until_ns = ms_monotonic_ns() + slice_ns;
    const int64_t flush_until_ns = flush_ns < until_ns ? flush_ns : until_ns, slave_until_ns = slave_ns < until_ns ? slave_ns : until_ns;
    if (slice_ns == 0) {
        *code = calls->wait_persisted(producer, end_offset, how, flush_until_ns, slave_until_ns);
    } else {
        session->users++;
        Py_BEGIN_ALLOW_THREADS
        *code = calls->wait_persisted(producer, end_offset, how, flush_until_ns, slave_until_ns);
        Py_END_ALLOW_THREADS
        session->users--;
    }
    /* Without the slaves that it needs, wait_persisted says so after the slice, but the disk still has until its own deadline. */
    const int disk_may_follow = until_ns < flush_ns && (how & MS_PUT_DURABLE) != 0;
    const int is_on_disk = ms_load_acquire(&producer->control->flushed.value) >= end_offset;
    if (*code == MS_PRODUCER_AGAIN || (*code == MS_PRODUCER_NO_SLAVE && !is_on_disk))
        return !disk_may_follow;
    return *code != MS_PRODUCER_UNCONFIRMED || until_ns >= slave_ns;
}

/* Advance the future by the answers that have arrived; with a slice, wait for them. -1 with an exception. Threads on the same
 * future run one after another except in the waits, after which each reads its state again. */
static int advance(struct pending_object *pending, int64_t slice_ns)
{
    struct session_object *session = pending->session;
    int failed = 0, code = 0;
    if (session == NULL)
        return 0;
    Py_INCREF((PyObject *)session);
    take_answers(session);
    if (pending->state == PENDING_WAITS && session->producer != NULL && slice_ns > 0) {
        failed = wait_acked(session, pending->sequence, slice_ns) != 0;
        take_answers(session);
        if (!failed && pending->state == PENDING_WAITS && session->producer != NULL && session->calls->is_closed(session->producer))
            failed = pending_hand_over(pending) != 0; /* no answers arrive any more: the thread of answers reports it */
    }
    if (!failed && pending->state == PENDING_ANSWERED) {
        int is_over = pending->how == 0 || pending->answer.status != 0;
        if (!is_over && session->producer != NULL)
            is_over = is_persisted(pending, slice_ns, &code);
        if (is_over && pending->state == PENDING_ANSWERED)
            failed = resolve_answered(pending, code) != 0;
        else if (slice_ns > 0)
            failed = PyErr_CheckSignals() != 0;
    }
    if (!failed && session->producer == NULL && (pending->state == PENDING_WAITS || pending->state == PENDING_ANSWERED))
        failed = resolve_without_session(pending) != 0;
    Py_DECREF((PyObject *)session);
    return failed ? -1 : 0;
}

/* Wait until there is a result or a Future that will have it; 0, or -1 with an exception (TimeoutError). */
static int wait_for(struct pending_object *pending, PyObject *timeout, double *left_s)
{
    int64_t until_ns = FOR_EVER_NS;
    if (timeout != NULL && timeout != Py_None) {
        double timeout_s = PyFloat_AsDouble(timeout);
        if (timeout_s == -1.0 && PyErr_Occurred())
            return -1;
        until_ns = ms_monotonic_ns() + (int64_t)(fmax(0.0, fmin(timeout_s, 1e9)) * 1e9);
    }
    for (int64_t late_ns = ms_monotonic_ns() + OWN_WAIT_NS_MAX;;) {
        if (pending->state == PENDING_WAITS && ms_monotonic_ns() >= late_ns && pending_hand_over(pending) != 0)
            return -1; /* it checks whether the engine was replaced */
        if (pending->state == PENDING_RESOLVED || pending->state == PENDING_HANDED)
            break;
        int64_t left_ns = until_ns == FOR_EVER_NS ? SLICE_NS : until_ns - ms_monotonic_ns();
        if (advance(pending, left_ns <= 0 ? 0 : left_ns < SLICE_NS ? left_ns
                                                                   : SLICE_NS) != 0)
            return -1;
        if (left_ns <= 0 && (pending->state == PENDING_WAITS || pending->state == PENDING_ANSWERED)) {
            PyErr_SetNone(PyExc_TimeoutError); /* concurrent.futures' is the same since Python 3.11 */
            return -1;
        }
    }
    *left_s = until_ns == FOR_EVER_NS ? -1 : fmax(0.0, (double)(until_ns - ms_monotonic_ns()) / 1e9);
    return 0;
}

/* Return the PutError of a resolved put that raises one, otherwise its result. Each call makes an error, because the traceback of one
 * that the future kept would refer to the future. */
static PyObject *result_or_error(const struct pending_object *pending, int *is_error)
{
    *is_error = pending->is_refused && pending->raises;
    return *is_error ? PyObject_CallFunctionObjArgs(future_error, pending->result, NULL) : Py_NewRef(pending->result);
}

static PyObject *ask(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names, PyObject *of_future,
                     const char *called)
{
    struct pending_object *pending = (struct pending_object *)object;
    Py_ssize_t named = names != NULL ? PyTuple_Size(names) : 0;
    if (count + named > 1 || (named == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), "timeout") != 0)) {
        PyErr_Format(PyExc_TypeError, "%s(timeout=None) takes one argument", called);
        return NULL;
    }
    double left_s;
    if (wait_for(pending, count + named == 1 ? arguments[0] : Py_None, &left_s) != 0)
        return NULL;
    if (pending->state == PENDING_HANDED) {
        PyObject *left = left_s < 0 ? Py_NewRef(Py_None) : PyFloat_FromDouble(left_s);
        PyObject *found = left == NULL ? NULL : PyObject_CallFunctionObjArgs(of_future, object, left, NULL);
        Py_XDECREF(left);
        return found;
    }
    int is_error;
    PyObject *found = result_or_error(pending, &is_error);
    if (found != NULL && is_error == (of_future == future_result)) { /* raise the error, or return no exception */
        if (is_error)
            PyErr_SetObject((PyObject *)Py_TYPE(found), found);
        replace(&found, is_error ? NULL : Py_NewRef(Py_None));
    }
    return found;
}

static PyObject *pending_result(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names)
{
    return ask(object, arguments, count, names, future_result, "result");
}

static PyObject *pending_exception(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names)
{
    return ask(object, arguments, count, names, future_exception, "exception");
}

/* Check without waiting, perhaps repeatedly. A late future goes to the thread of answers, which checks whether the engine
 * lives. */
static int poll_answer(struct pending_object *pending)
{
    if (pending->state != PENDING_HANDED && advance(pending, 0) != 0)
        return -1;
    if (pending->state == PENDING_WAITS && ms_monotonic_ns() - pending->submitted_ns >= OWN_WAIT_NS_MAX)
        return pending_hand_over(pending);
    return 0;
}

static PyObject *pending_done(PyObject *object, PyObject *none)
{
    struct pending_object *pending = (struct pending_object *)object;
    if (poll_answer(pending) != 0)
        return NULL;
    if (pending->state == PENDING_HANDED)
        return PyObject_CallFunctionObjArgs(future_done, object, NULL);
    return PyBool_FromLong(pending->state == PENDING_RESOLVED);
}

/* _wait(slice_ns): wait for a slice; return whether there is a result or a Future that will have it. */
static PyObject *pending_wait(PyObject *object, PyObject *slice_ns)
{
    struct pending_object *pending = (struct pending_object *)object;
    const int64_t slice = PyLong_AsLongLong(slice_ns);
    if ((slice == -1 && PyErr_Occurred()) || (pending->state != PENDING_HANDED && advance(pending, slice) != 0))
        return NULL;
    return PyBool_FromLong(pending->state == PENDING_RESOLVED || pending->state == PENDING_HANDED);
}

static PyObject *pending_running(PyObject *object, PyObject *none)
{
    struct pending_object *pending = (struct pending_object *)object;
    if (poll_answer(pending) != 0)
        return NULL;
    if (pending->state == PENDING_HANDED)
        return PyObject_CallFunctionObjArgs(future_running, object, NULL);
    return PyBool_FromLong(pending->state != PENDING_RESOLVED);
}

static PyObject *pending_no(PyObject *object, PyObject *none)
{
    Py_RETURN_FALSE;
}

/* Turn it into a full concurrent.futures.Future, which the thread of answers resolves. */
static PyObject *pending_become_future(PyObject *object, PyObject *none)
{
    struct pending_object *pending = (struct pending_object *)object;
    if (pending->state != PENDING_HANDED && advance(pending, 0) != 0)
        return NULL;
    if (pending_hand_over(pending) != 0)
        return NULL;
    if (pending->state == PENDING_RESOLVED) {
        int is_error;
        PyObject *found = result_or_error(pending, &is_error);
        PyObject *fields = found == NULL ? NULL : PyObject_CallFunctionObjArgs(future_settled, found, NULL);
        PyObject *own_fields = fields == NULL ? NULL : PyObject_GenericGetDict(object, NULL);
        int failed = own_fields == NULL;
        if (!failed && pending->state == PENDING_RESOLVED) { /* as in hand_over_once */
            failed = become_handed(pending, own_fields, fields, NULL, NULL) != 0;
            if (!failed)
                Py_CLEAR(pending->result);
        }
        Py_XDECREF(own_fields);
        Py_XDECREF(fields);
        Py_XDECREF(found);
        if (failed)
            return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *pending_add_done_callback(PyObject *object, PyObject *callback)
{
    PyObject *done = pending_become_future(object, NULL);
    if (done == NULL)
        return NULL;
    Py_DECREF(done);
    return PyObject_CallFunctionObjArgs(future_add_done_callback, object, callback, NULL);
}

/* Remove it from the session first, because releasing its other parts may run Python. If it is resurrected, the thread of
 * answers has its outcome. */
static void pending_finalize(PyObject *object)
{
    leave_session((struct pending_object *)object);
}

static void pending_dealloc(PyObject *object)
{
    struct pending_object *pending = (struct pending_object *)object;
    struct session_object *session = pending->session;
    int waited = pending->state == PENDING_WAITS && session != NULL && session->producer != NULL;
    leave_session(pending);
    if (waited) /* its result is not needed any more */
        session->calls->finish(session->producer, pending->sequence);
    Py_CLEAR(pending->session);
    Py_CLEAR(pending->topic);
    Py_CLEAR(pending->result);
    free_object(object);
}

static PyObject *pending_has_answer(PyObject *object, void *unused)
{
    struct pending_object *pending = (struct pending_object *)object;
    if (pending->state == PENDING_WAITS)
        take_answers(pending->session);
    return PyBool_FromLong(pending->state == PENDING_ANSWERED || pending->state == PENDING_RESOLVED);
}

static PyMemberDef members[] = {
    {"_raises", T_BOOL, offsetof(struct pending_object, raises), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyObject *pending_owner(PyObject *object, void *unused)
{
    struct session_object *session = ((struct pending_object *)object)->session;
    return Py_NewRef(session == NULL ? Py_None : session->owner);
}

static PyGetSetDef getters[] = {
    {"_has_answer", pending_has_answer, NULL, NULL, NULL},
    {"_owner", pending_owner, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef methods[] = {
    {"result", (PyCFunction)(void (*)(void))pending_result, METH_FASTCALL | METH_KEYWORDS, "The PutResult; PutError if it is not PUT_OK, TimeoutError when it is not there in time."},
    {"exception", (PyCFunction)(void (*)(void))pending_exception, METH_FASTCALL | METH_KEYWORDS, "The PutError that result() raises, None if it raises none."},
    {"done", pending_done, METH_NOARGS, "Whether the result is there."},
    {"running", pending_running, METH_NOARGS, "Whether the result is still to come."},
    {"cancel", pending_no, METH_NOARGS, "False: what was submitted is stored."},
    {"cancelled", pending_no, METH_NOARGS, "False."},
    {"add_done_callback", pending_add_done_callback, METH_O, "Call it with this future once the result is there, in the thread of answers."},
    {"_become_future", pending_become_future, METH_NOARGS, NULL},
    {"_wait", pending_wait, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, pending_make},
    {Py_tp_finalize, pending_finalize},
    {Py_tp_dealloc, pending_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, getters},
    {Py_tp_doc, "The future of one put_async: takes its answer out of the session when it is asked."},
    {0, NULL},
};

/* use_futures(PutFuture, Future): set PutFuture, a subclass of PendingPut and of concurrent.futures.Future. */
static PyObject *use_futures(PyObject *module, PyObject *arguments)
{
    PyObject *own, *base;
    if (!PyArg_ParseTuple(arguments, "O!O:use_futures", &PyType_Type, &own, &base))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)own, pending_type)) {
        PyErr_SetString(PyExc_TypeError, "futures are made of a subclass of PendingPut");
        return NULL;
    }
    const struct {
        PyObject **to;
        PyObject *of;
        const char *name;
    } functions[] = {
        {&future_result, base, "result"},
        {&future_exception, base, "exception"},
        {&future_done, base, "done"},
        {&future_running, base, "running"},
        {&future_add_done_callback, base, "add_done_callback"},
        {&future_settled, own, "_settled"},
        {&future_error, own, "_error"},
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        PyObject *function = PyObject_GetAttrString(functions[i].of, functions[i].name);
        if (function == NULL)
            return NULL;
        replace(functions[i].to, function);
    }
    Py_XDECREF((PyObject *)future_class);
    future_class = (PyTypeObject *)Py_NewRef(own);
    Py_RETURN_NONE;
}
static PyMethodDef functions[] = {{"use_futures", use_futures, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

int pending_init(PyObject *module)
{
    pending_type = add_type(module, "pyengine._front.PendingPut", sizeof(struct pending_object), Py_TPFLAGS_BASETYPE, slots);
    return pending_type == NULL || PyModule_AddFunctions(module, functions) != 0 ? -1 : 0;
}
