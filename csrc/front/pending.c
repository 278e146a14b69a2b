/* The future of one put: whoever asks for the result drives it, a thread that waits, an event loop that looks, or Python's thread of
 * answers for callbacks. */
#include "front.h"

#include <math.h>

#define SLICE_NS 50000000
/* From this age on, and this often in a session, an unanswered put checks whether the engine was replaced. */
#define LOOK_INTERVAL_NS 250000000
/* How long such a check may sleep where its caller does not wait. */
#define LOOK_NS 1000
/* Interval of looks at a put that waits for room, which another thread submits. */
#define QUEUED_POLL_NS 1000000
#define FOR_EVER_NS INT64_MAX

PyTypeObject *pending_type;
PyTypeObject *future_class; /* PutFuture: of this and of concurrent.futures.Future */
/* Of PutFuture and Future: what a future with callbacks has more, how it gets one, and the error of a refused put. */
static PyObject *future_fields, *future_add_done_callback, *future_error;

static int is_open(const struct pending_object *pending)
{
    return pending->state == PENDING_WAITS || pending->state == PENDING_ANSWERED;
}

static PyObject *pending_make(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    return new_object(type);
}

static void join_session(struct pending_object *pending)
{
    struct session_object *session = pending->session;
    if (session->waiting == 0 || pending->sequence < session->first)
        session->first = pending->sequence;
    struct pending_object **slot = &session->slots[pending->sequence % MS_COMPLETIONS];
    session->waiting += *slot == NULL; /* a slot is still used if an exception ended a put early; that future finds no answer */
    *slot = pending;
}

void pending_submitted(struct pending_object *pending, struct session_object *session, const struct put *put, uint64_t sequence)
{
    struct ms_producer *producer = session->producer;
    pending->session = (struct session_object *)Py_NewRef((PyObject *)session);
    pending->topic = Py_NewRef(put->topic);
    pending->context = put->context == NULL || put->context == Py_None ? NULL : Py_NewRef(put->context);
    pending->queue_id = put->queue_id;
    pending->kind = put->kind;
    pending->how = put->how;
    pending->submitted_ns = put->submitted_ns;
    pending->target_before = producer->target_before;
    pending->sequence = sequence;
    pending->state = PENDING_WAITS;
    if (producer->unclaimed == sequence)
        producer->unclaimed = 0; /* this object finishes its answer */
    join_session(pending);
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

static void join_list(struct pending_object *pending)
{
    struct session_object *session = pending->session;
    *session->answered_end = pending; /* in order of submission */
    pending->link = session->answered_end;
    pending->next = NULL;
    session->answered_end = &pending->next;
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
    join_list(pending);
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
            continue; /* it stays, and its outcome is unknown */
        *slot = NULL;
        session->waiting--;
        session->calls->finish(producer, session->first);
        answer_one(pending, &answer);
    }
}

int wait_acked(struct session_object *session, uint64_t sequence, int64_t target_before, int how, int64_t slice_ns, int *code)
{
    struct ms_producer *producer = session->producer;
    struct ms_completion unused;
    session->users++;
    Py_BEGIN_ALLOW_THREADS
    *code = session->calls->wait_answer(producer, sequence, target_before, how, ms_monotonic_ns() + slice_ns, &unused);
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
    Py_CLEAR(pending->context);
}

PyObject *outcome_of(struct session_object *session, int code, const struct ms_completion *answer, const struct put *put)
{
    PyObject *numbers = answer != NULL ? answer_tuple(answer) : Py_NewRef(Py_None);
    if (numbers == NULL)
        return NULL;
    PyObject *result = PyObject_CallMethod(session->owner, "outcome", "iOiOLiO", code, numbers, put->kind, put->topic, put->queue_id,
                                           put->how, put->context == NULL ? Py_None : put->context);
    Py_DECREF(numbers);
    return result;
}

static struct put put_of(const struct pending_object *pending)
{
    return (struct put){pending->topic, pending->context, pending->queue_id, pending->submitted_ns, pending->kind, pending->how};
}

/* Set the result of an answer with `code` (0, or why it is not durable or confirmed), or of a put without an answer; Python makes
 * it unless it is PUT_OK of one message. Another thread may have advanced the future meanwhile: then this result is not used. */
static int resolve_as(struct pending_object *pending, int code)
{
    struct session_object *session = pending->session;
    const enum pending_state before = pending->state;
    const int is_answered = before == PENDING_ANSWERED, is_ok = is_answered && code == 0 && pending->answer.status == 0;
    const struct put put = put_of(pending);
    PyObject *result = is_ok && put.kind == MS_ENTRY_PUT && put.context == NULL
                           ? result_of(session->result_type, &pending->answer, put.topic, put.queue_id, session->store_host)
                           : outcome_of(session, code, is_answered ? &pending->answer : NULL, &put);
    if (result == NULL)
        return -1;
    if (pending->state == before)
        resolve(pending, result, !is_ok);
    else
        Py_DECREF(result);
    return 0;
}

static PyObject *unknown_result(const struct pending_object *pending, int is_lost)
{
    return PyObject_CallMethod(pending->session->owner, "unknown", "iOLi", pending->kind, pending->topic, pending->queue_id, is_lost);
}

/* Resolve a put of the parent process's session (session_forget), whose outcome is unknown here. */
static int resolve_lost(struct pending_object *pending)
{
    PyObject *result = unknown_result(pending, 1);
    if (result != NULL && is_open(pending))
        resolve(pending, result, 1);
    else
        Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Return whether the wait for the disk and for slaves is over: 1 and *code, or 0. It waits for a slice at most; without one it
 * only looks, and keeps the GIL. */
static int is_persisted(struct pending_object *pending, int64_t slice_ns, int *code)
{
    struct session_object *session = pending->session;
    struct ms_producer *producer = session->producer;
    const int64_t end_offset = pending->answer.end_offset, give_up_ns = session->give_up_ns != 0 ? session->give_up_ns : FOR_EVER_NS;
    const int64_t flush_ns = ms_earlier(pending->flush_deadline_ns, give_up_ns), slave_ns = ms_earlier(pending->slave_deadline_ns, give_up_ns);
    const int64_t until_ns = ms_monotonic_ns() + slice_ns;
    const int how = pending->how;
    session->users++;
    PyThreadState *const state = slice_ns > 0 ? PyEval_SaveThread() : NULL;
    *code = session->calls->wait_persisted(producer, end_offset, how, flush_ns, slave_ns, until_ns);
    if (state != NULL)
        PyEval_RestoreThread(state);
    session->users--;
    return *code != MS_PRODUCER_UNFINISHED;
}

/* Wait for the answer for a slice; without one only look, and rarely also whether the engine lives and is the same. Of a session that
 * has ended the outcome is unknown. */
static int advance_waiting(struct pending_object *pending, int64_t slice_ns)
{
    struct session_object *session = pending->session;
    const int64_t now_ns = ms_monotonic_ns(), age_ns = now_ns - pending->submitted_ns;
    int code = MS_PRODUCER_AGAIN;
    if (age_ns >= LOOK_INTERVAL_NS && now_ns >= session->look_ns) {
        session->look_ns = now_ns + LOOK_INTERVAL_NS;
        PyObject *looked = PyObject_CallMethod(session->owner, "look", NULL);
        if (looked == NULL)
            return -1;
        Py_DECREF(looked);
        slice_ns = slice_ns > LOOK_NS ? slice_ns : LOOK_NS;
    }
    if (slice_ns > 0 && pending->state == PENDING_WAITS && session->producer != NULL) {
        const int how = age_ns < SLICE_NS ? pending->how : 0; /* an older one rings for the writer again, and looks for the engine */
        if (wait_acked(session, pending->sequence, pending->target_before, how, slice_ns, &code) != 0)
            return -1;
        take_answers(session);
    } else if (age_ns >= LOOK_INTERVAL_NS && pending->state == PENDING_WAITS && session->producer != NULL &&
               session->calls->is_closed(session->producer)) {
        code = MS_PRODUCER_CLOSED;
        take_answers(session); /* those that came before it closed */
    }
    if (pending->state != PENDING_WAITS || session->producer == NULL)
        return 0;
    if (code == MS_PRODUCER_CLOSED || (session->give_up_ns != 0 && ms_monotonic_ns() >= session->give_up_ns))
        return resolve_as(pending, code);
    return 0;
}

static int advance_answered(struct pending_object *pending, int64_t slice_ns)
{
    int code = 0, is_over = pending->how == 0 || pending->answer.status != 0;
    if (!is_over && pending->session->producer != NULL)
        is_over = is_persisted(pending, slice_ns, &code);
    if (is_over && pending->state == PENDING_ANSWERED)
        return resolve_as(pending, code);
    return slice_ns > 0 ? PyErr_CheckSignals() : 0;
}

/* Advance the future by what has arrived; with a slice, wait for it. -1 with an exception. Threads on the same future run one
 * after another except in the waits and in Python, after which each reads its state again. */
static int advance(struct pending_object *pending, int64_t slice_ns)
{
    struct session_object *session = pending->session;
    int failed = 0;
    if (session == NULL) {
        if (pending->state == PENDING_QUEUED && slice_ns > 0) {
            const struct timespec interval = {.tv_nsec = slice_ns < QUEUED_POLL_NS ? slice_ns : QUEUED_POLL_NS};
            Py_BEGIN_ALLOW_THREADS
            nanosleep(&interval, NULL);
            Py_END_ALLOW_THREADS
            failed = PyErr_CheckSignals();
        }
        return failed;
    }
    Py_INCREF((PyObject *)session);
    if (pending->has_left) { /* it came back to life */
        pending->has_left = 0;
        if (pending->state == PENDING_WAITS)
            join_session(pending);
        else if (pending->how != 0 && pending->answer.status == 0)
            join_list(pending);
    }
    take_answers(session);
    if (pending->state == PENDING_WAITS && session->producer != NULL)
        failed = advance_waiting(pending, slice_ns);
    if (!failed && pending->state == PENDING_ANSWERED)
        failed = advance_answered(pending, slice_ns);
    if (!failed && is_open(pending) && session->producer == NULL)
        failed = resolve_lost(pending);
    Py_DECREF((PyObject *)session);
    return failed ? -1 : 0;
}

int pending_finish(struct pending_object *pending)
{
    struct session_object *session = pending->session;
    int failed = 0;
    Py_INCREF((PyObject *)pending);
    while (!failed && is_open(pending) && session->producer != NULL) {
        const int64_t left_ns = session->give_up_ns - ms_monotonic_ns();
        failed = advance(pending, left_ns <= 0 ? 0 : left_ns < SLICE_NS ? left_ns
                                                                        : SLICE_NS);
    }
    const int64_t now_ns = ms_monotonic_ns();
    if (now_ns < session->give_up_ns && session->give_up_ns < now_ns + session->patience_ns)
        session->give_up_ns = now_ns + session->patience_ns;
    Py_DECREF((PyObject *)pending);
    return failed;
}

/* Wait for the result until a time: 0, 1 when there is none by then, -1 with an exception. `is_put`: as a put waits, which is for its
 * answer only until then, and afterwards as long as the disk and the slaves may take. */
static int wait_until(struct pending_object *pending, int64_t until_ns, int is_put)
{
    while (pending->state != PENDING_RESOLVED) {
        const int is_bounded = until_ns != FOR_EVER_NS && !(is_put && pending->state == PENDING_ANSWERED);
        const int64_t left_ns = is_bounded ? until_ns - ms_monotonic_ns() : SLICE_NS;
        if (advance(pending, left_ns <= 0 ? 0 : left_ns < SLICE_NS ? left_ns
                                                                   : SLICE_NS) != 0)
            return -1;
        if (left_ns <= 0 && pending->state != PENDING_RESOLVED && !(is_put && pending->state == PENDING_ANSWERED))
            return 1;
    }
    return 0;
}

PyObject *pending_await(struct pending_object *pending, int64_t deadline_ns)
{
    const int found = wait_until(pending, deadline_ns, 1);
    if (found < 0)
        return NULL;
    return found == 0 ? Py_NewRef(pending->result) : unknown_result(pending, 0);
}

/* Return the PutError of a resolved put that raises one, otherwise its result. Each call makes an error, because the traceback of one
 * that the future kept would refer to the future. */
static PyObject *result_or_error(const struct pending_object *pending, int *is_error)
{
    *is_error = pending->is_refused && pending->raises;
    return *is_error ? PyObject_CallFunctionObjArgs(future_error, pending->result, NULL) : Py_NewRef(pending->result);
}

static PyObject *ask(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names, const char *called, int wants_error)
{
    struct pending_object *pending = (struct pending_object *)object;
    Py_ssize_t named = names != NULL ? PyTuple_Size(names) : 0;
    if (count + named > 1 || (named == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), "timeout") != 0)) {
        PyErr_Format(PyExc_TypeError, "%s(timeout=None) takes one argument", called);
        return NULL;
    }
    PyObject *timeout = count + named == 1 ? arguments[0] : Py_None;
    int64_t until_ns = FOR_EVER_NS;
    if (timeout != Py_None) {
        double timeout_s = PyFloat_AsDouble(timeout);
        if (timeout_s == -1.0 && PyErr_Occurred())
            return NULL;
        until_ns = ms_monotonic_ns() + (int64_t)(fmax(0.0, fmin(timeout_s, 1e9)) * 1e9);
    }
    const int found = wait_until(pending, until_ns, 0);
    if (found > 0)
        PyErr_SetNone(PyExc_TimeoutError); /* concurrent.futures' is the same since Python 3.11 */
    if (found != 0)
        return NULL;
    int is_error;
    PyObject *given = result_or_error(pending, &is_error);
    if (given != NULL && is_error != wants_error) { /* raise the error, or return no exception */
        if (is_error)
            PyErr_SetObject((PyObject *)Py_TYPE(given), given);
        replace(&given, is_error ? NULL : Py_NewRef(Py_None));
    }
    return given;
}

static PyObject *pending_result(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names)
{
    return ask(object, arguments, count, names, "result", 0);
}

static PyObject *pending_exception(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names)
{
    return ask(object, arguments, count, names, "exception", 1);
}

static PyObject *is_resolved(PyObject *object, int64_t slice_ns, int wanted)
{
    struct pending_object *pending = (struct pending_object *)object;
    if (pending->state != PENDING_RESOLVED && advance(pending, slice_ns) != 0)
        return NULL;
    return PyBool_FromLong((pending->state == PENDING_RESOLVED) == wanted);
}

static PyObject *pending_done(PyObject *object, PyObject *none)
{
    return is_resolved(object, 0, 1);
}

static PyObject *pending_running(PyObject *object, PyObject *none)
{
    return is_resolved(object, 0, 0);
}

static PyObject *pending_wait(PyObject *object, PyObject *slice_ns)
{
    const int64_t slice = PyLong_AsLongLong(slice_ns);
    return slice == -1 && PyErr_Occurred() ? NULL : is_resolved(object, slice, 1);
}

static PyObject *pending_await_put(PyObject *object, PyObject *deadline_ns)
{
    const int64_t deadline = PyLong_AsLongLong(deadline_ns);
    return deadline == -1 && PyErr_Occurred() ? NULL : pending_await((struct pending_object *)object, deadline);
}

static PyObject *pending_resolve(PyObject *object, PyObject *result)
{
    struct pending_object *pending = (struct pending_object *)object;
    const int is_ok = PyObject_IsTrue(result);
    if (is_ok < 0)
        return NULL;
    if (pending->state != PENDING_QUEUED) {
        PyErr_SetString(PyExc_ValueError, "the result of a put that was submitted is the engine's");
        return NULL;
    }
    resolve(pending, Py_NewRef(result), !is_ok);
    Py_RETURN_NONE;
}

static PyObject *pending_no(PyObject *object, PyObject *none)
{
    Py_RETURN_FALSE;
}

/* Give it the fields of a Future, unless another thread, or code that Python ran here, has changed it meanwhile; then the caller
 * repeats it. After its session's end nothing is watched: all of its futures have a result. */
static int watch_once(struct pending_object *pending)
{
    if (pending->state != PENDING_RESOLVED && advance(pending, 0) != 0)
        return -1;
    const int is_done = pending->state == PENDING_RESOLVED;
    PyObject *session = Py_XNewRef((PyObject *)pending->session);
    PyObject *tell = session == NULL ? Py_NewRef(Py_None) : PyObject_CallMethod(((struct session_object *)session)->owner, "ready", NULL);
    PyObject *fields = tell == NULL ? NULL : PyObject_CallFunctionObjArgs(future_fields, is_done ? Py_True : Py_False, NULL);
    PyObject *own_fields = fields == NULL ? NULL : PyObject_GenericGetDict((PyObject *)pending, NULL);
    PyObject *entry = own_fields == NULL ? NULL : PyTuple_Pack(2, (PyObject *)pending, Py_None);
    int failed = entry == NULL;
    const int is_same = (pending->state == PENDING_RESOLVED) == is_done && (PyObject *)pending->session == session &&
                        (session == NULL || pending->session->producer != NULL);
    if (!failed && !pending->is_watched && is_same) {
        failed = PyDict_Update(own_fields, fields) != 0;
        PyObject *told = failed || session == NULL ? Py_NewRef(Py_None) : PyObject_CallFunctionObjArgs(tell, entry, NULL);
        failed = failed || told == NULL;
        pending->is_watched = !failed;
        Py_XDECREF(told);
    }
    Py_XDECREF(entry);
    Py_XDECREF(own_fields);
    Py_XDECREF(fields);
    Py_XDECREF(tell);
    Py_XDECREF(session);
    return failed ? -1 : 0;
}

static PyObject *pending_watch(PyObject *object, PyObject *none)
{
    struct pending_object *pending = (struct pending_object *)object;
    while (!pending->is_watched)
        if (watch_once(pending) != 0)
            return NULL;
    Py_RETURN_NONE;
}

static PyObject *pending_add_done_callback(PyObject *object, PyObject *callback)
{
    PyObject *watched = pending_watch(object, NULL);
    if (watched == NULL)
        return NULL;
    Py_DECREF(watched);
    return PyObject_CallFunctionObjArgs(future_add_done_callback, object, callback, NULL);
}

/* Remove it from the session first, because releasing its other parts may run Python, which may bring it back to life. */
static void pending_finalize(PyObject *object)
{
    struct pending_object *pending = (struct pending_object *)object;
    leave_session(pending);
    pending->has_left = is_open(pending);
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
    Py_CLEAR(pending->context);
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

static PyObject *pending_owner(PyObject *object, void *unused)
{
    struct session_object *session = ((struct pending_object *)object)->session;
    return Py_NewRef(session == NULL ? Py_None : session->owner);
}

static PyMemberDef members[] = {
    {"_raises", T_BOOL, offsetof(struct pending_object, raises), 0, NULL},
    {"_is_watched", T_BOOL, offsetof(struct pending_object, is_watched), READONLY, NULL},
    {"_waits", T_INT, offsetof(struct pending_object, how), READONLY, NULL},
    {"_given", T_OBJECT, offsetof(struct pending_object, result), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
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
    {"_watch", pending_watch, METH_NOARGS, NULL},
    {"_wait", pending_wait, METH_O, "_wait(slice_ns): wait for a slice; return whether the result is there."},
    {"_await", pending_await_put, METH_O, "_await(deadline_ns): return the result; an indeterminate one if the writer has not answered by then."},
    {"_resolve", pending_resolve, METH_O, "_resolve(result): end a put that was not submitted with this result."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, pending_make},
    {Py_tp_finalize, pending_finalize},
    {Py_tp_dealloc, pending_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, getters},
    {Py_tp_doc, "The future of one put: takes its answer out of the session when it is asked."},
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
        {&future_fields, own, "_fields"},
        {&future_add_done_callback, base, "add_done_callback"},
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
    const unsigned int flags = Py_TPFLAGS_BASETYPE;
    return add_type(module, &pending_type, "pyengine._front.PendingPut", sizeof(struct pending_object), flags, slots) != 0
               ? -1
               : PyModule_AddFunctions(module, functions);
}
