/* ProducerFront and SubmitterFront: put, put_async and put_many with no options but queue and tags (the fast path).
 *
 * A program calls them as methods of pyengine.client.producer.Producer. All other puts use its methods _put_any,
 * _put_async_any and _put_many_any in Python (the slow path), which also store the prefixes for the fast path.
 */
#include "front.h"

#include <stdlib.h>

/* Polls of the answer before other threads of this program may run. */
#define SPINS 1500
#define ROOM_SLICE_NS 10000000
/* From this size on the bodies of one call are copied without the GIL. */
#define LARGE_COPY_BYTES 65536
/* For how many free answer slots a put_async waits, when there is none. */
#define ROOM_BATCH 512
#define FAILED 1 /* beside the codes of producer.cdef.h, which are not above 0 */

/* SubmitterFront, the base of pyengine.client.submission.Submitter: the current session. */
struct submitter_object {
    PyObject_HEAD
    PyObject *lock;              /* Lock: held while something is submitted */
    PyObject *session;           /* SessionFront, or None */
    PyObject *queued;            /* deque: puts that another thread will submit */
    long long body_bytes_max;    /* of one message on the fast path */
    long long payload_bytes_max; /* of an entry with many */
    int how;                     /* what a put waits for: MS_PUT_DURABLE, MS_PUT_CONFIRMED */
    char raises;                 /* a put that is not PUT_OK raises PutError */
    long long sessions;          /* number of those that were opened */
};

struct front_object {
    PyObject_HEAD
    PyObject *puts;              /* the Submitter */
    long long sessions;          /* of the Submitter when all below was remembered: it is of one engine */
    PyObject *prefixes;          /* dict: (topic, queue_id, tags, flag) -> bytes */
    PyObject *turns;             /* dict: topic -> Turn */
    PyObject *choice;            /* QueueChoice, or None */
    /* The arguments of the last put, since most programs repeat them. */
    PyObject *topic, *queue, *tags, *prefix;
    long long queue_id;
    PyObject *turn_topic, *turn; /* of the last put without a queue */
};

/* The queues of a topic in turn, for puts that name none. */
struct turn_object {
    PyObject_HEAD
    unsigned long long next;
    long long queues;
    long long until_ns;
};

static PyTypeObject *submitter_type, *turn_type;
static PyObject *name_queue_id, *name_tags, *name_put_any, *name_async_any, *name_many_any, *zero;

struct request {
    PyObject *topic, *body, *queue, *tags;
    PyObject *prefix;            /* a reference of its own, on the fast path */
    struct turn_object *turn;    /* one too, if the queue is of its topic's turn */
    long long queue_id;
    char *bytes;                 /* of one body */
    Py_ssize_t body_bytes;
    struct piece *pieces;        /* of put_many: its bodies, with references of its own; NULL for one body */
    Py_ssize_t bodies;
    uint64_t sum;                /* their bytes */
};

struct piece {
    PyObject *owner;
    const char *bytes;
    Py_ssize_t size;
};

/* Return whether the number of queues need not be read again yet. */
static int turn_is_current(const struct turn_object *turn)
{
    struct timespec now; /* to 4 ms, for a tenth of what the exact clock costs */
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return turn->queues > 0 && (long long)now.tv_sec * 1000000000 + now.tv_nsec < turn->until_ns;
}

/* Return the next queue of a turn with queues. */
static long long turn_take(struct turn_object *turn)
{
    return (long long)(turn->next++ % (unsigned long long)turn->queues);
}

static struct submitter_object *submitter_of(const struct front_object *front)
{
    return (struct submitter_object *)front->puts;
}

static void release_request(struct request *request)
{
    Py_CLEAR(request->prefix);
    Py_CLEAR(request->turn);
    for (Py_ssize_t i = 0; request->pieces != NULL && i < request->bodies; i++)
        Py_DECREF(request->pieces[i].owner);
    free(request->pieces);
    request->pieces = NULL;
}

/* Release a request that the slow path handles; it takes the queue of the turn again. */
static void leave_request(struct request *request)
{
    if (request->turn != NULL)
        request->turn->next--;
    release_request(request);
}

/* Forget what was remembered of an engine that was replaced: prefixes have its host, and turns the queues that topics had. */
static void follow(struct front_object *front)
{
    if (front->sessions == submitter_of(front)->sessions)
        return;
    front->sessions = submitter_of(front)->sessions;
    replace(&front->choice, Py_NewRef(Py_None));
    PyDict_Clear(front->prefixes);
    PyDict_Clear(front->turns);
    Py_CLEAR(front->topic);
    Py_CLEAR(front->turn_topic);
}

static PyObject *front_follow(PyObject *object, PyObject *none)
{
    follow((struct front_object *)object);
    Py_RETURN_NONE;
}

/* Take the topic's next queue: 1; 0 if Python must, which reads how many queues there are; -1 with an exception. */
static int take_queue(struct front_object *front, struct request *request)
{
    if (request->topic != front->turn_topic) {
        if (!PyUnicode_CheckExact(request->topic))
            return 0;
        PyObject *turn = PyDict_GetItemWithError(front->turns, request->topic);
        if (turn == NULL || Py_TYPE(turn) != turn_type)
            return PyErr_Occurred() ? -1 : 0;
        replace(&front->turn, Py_NewRef(turn));
        replace(&front->turn_topic, Py_NewRef(request->topic));
    }
    struct turn_object *turn = (struct turn_object *)front->turn;
    if (!turn_is_current(turn))
        return 0;
    request->turn = (struct turn_object *)Py_NewRef(front->turn);
    request->queue_id = turn_take(turn);
    return 1;
}

/* Find the prefix of a topic, queue and tags that are not those of the last put; result as of read_request. */
static int find_prefix(struct front_object *front, const struct request *request)
{
    if ((request->turn == NULL && !PyLong_CheckExact(request->queue)) || !PyUnicode_CheckExact(request->topic) ||
        !(request->tags == Py_None || PyUnicode_CheckExact(request->tags)))
        return 0;
    PyObject *queue = request->turn == NULL ? Py_NewRef(request->queue) : PyLong_FromLongLong(request->queue_id);
    PyObject *key = queue == NULL ? NULL : PyTuple_Pack(4, request->topic, queue, request->tags, zero);
    PyObject *prefix = key == NULL ? NULL : PyDict_GetItemWithError(front->prefixes, key);
    Py_XDECREF(key);
    if (prefix == NULL) {
        Py_XDECREF(queue);
        return PyErr_Occurred() ? -1 : 0;
    }
    front->queue_id = PyLong_AsLongLong(queue); /* cannot fail: a put had this queue before */
    replace(&front->prefix, Py_NewRef(prefix));
    replace(&front->topic, Py_NewRef(request->topic));
    replace(&front->queue, queue);
    replace(&front->tags, Py_NewRef(request->tags));
    return 1;
}

/* Read the arguments: 1 for the fast path, 0 for any other put, -1 with an exception. */
static int read_request(struct front_object *front, PyObject *const *arguments, Py_ssize_t count, PyObject *names,
                        struct request *request)
{
    request->prefix = NULL;
    request->turn = NULL;
    request->pieces = NULL;
    if (count != 2 || front->puts == NULL || submitter_of(front)->session == Py_None)
        return 0;
    follow(front);
    request->topic = arguments[0];
    request->body = arguments[1];
    request->queue = Py_None;
    request->tags = Py_None;
    Py_ssize_t named = names != NULL ? PyTuple_Size(names) : 0;
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        if (name == name_queue_id)
            request->queue = arguments[count + i];
        else if (name == name_tags)
            request->tags = arguments[count + i];
        else
            return 0;
    }
    int found = 1;
    if (request->queue == Py_None && (found = take_queue(front, request)) <= 0)
        return found;
    const int is_last_queue = request->turn != NULL ? request->queue_id == front->queue_id : request->queue == front->queue;
    if (!is_last_queue || request->topic != front->topic || request->tags != front->tags)
        found = find_prefix(front, request);
    if (found <= 0) {
        leave_request(request);
        return found;
    }
    request->prefix = Py_NewRef(front->prefix);
    request->queue_id = front->queue_id;
    return 1;
}

/* Read the arguments of a put of one body, like read_request. */
static int read_put(struct front_object *front, PyObject *const *arguments, Py_ssize_t count, PyObject *names, struct request *request)
{
    int found = read_request(front, arguments, count, names, request);
    if (found > 0 && (!PyBytes_CheckExact(request->body) ||
                      PyBytes_AsStringAndSize(request->body, &request->bytes, &request->body_bytes) != 0 ||
                      request->body_bytes > submitter_of(front)->body_bytes_max)) {
        leave_request(request);
        return 0;
    }
    return found;
}

static PyObject *slow_path(PyObject *object, PyObject *name, PyObject *const *arguments, Py_ssize_t count, PyObject *names)
{
    PyObject *method = PyObject_GetAttr(object, name);
    PyObject *given = PyTuple_New(count), *named = NULL, *result = NULL;
    if (method == NULL || given == NULL)
        goto out;
    for (Py_ssize_t i = 0; i < count; i++)
        PyTuple_SetItem(given, i, Py_NewRef(arguments[i]));
    if (names != NULL) {
        named = PyDict_New();
        for (Py_ssize_t i = 0; named != NULL && i < PyTuple_Size(names); i++)
            if (PyDict_SetItem(named, PyTuple_GetItem(names, i), arguments[count + i]) != 0)
                Py_CLEAR(named);
        if (named == NULL)
            goto out;
    }
    result = PyObject_Call(method, given, named);
out:
    Py_XDECREF(method);
    Py_XDECREF(given);
    Py_XDECREF(named);
    return result;
}

static int may_wait(struct submitter_object *puts)
{
    PyObject *may = PyObject_CallMethod((PyObject *)puts, "may_wait", NULL); /* not in an event loop or a callback */
    const int found = may == NULL ? -1 : may == Py_True;
    Py_XDECREF(may);
    return found;
}

/* Take the lock: 1 and the session, or NULL if it has ended; 0 if another thread has the lock and this one must not wait; -1
 * with an exception. */
static int take_session(struct submitter_object *puts, int always, PyObject **lock, struct session_object **session)
{
    *session = NULL;
    if (puts->lock == NULL || Py_TYPE(puts->lock) != lock_type) {
        PyErr_SetString(PyExc_TypeError, "the lock of a Submitter is a Lock");
        return -1;
    }
    *lock = Py_NewRef(puts->lock);
    int taken = lock_try(*lock);
    if (!taken) {
        taken = always ? 1 : may_wait(puts);
        if (taken > 0 && lock_take(*lock) != 0)
            taken = -1;
        if (taken <= 0) {
            Py_DECREF(*lock);
            return taken;
        }
    }
    if (puts->session != NULL && Py_TYPE(puts->session) == session_type && ((struct session_object *)puts->session)->producer != NULL)
        *session = (struct session_object *)Py_NewRef(puts->session);
    return 1;
}

static void release_session(PyObject *lock, struct session_object *session)
{
    lock_release(lock);
    Py_DECREF(lock);
    Py_XDECREF((PyObject *)session);
}

/* Reserve room for an entry, without waiting; return where its payload belongs, or NULL and *code. The lock is held. */
static uint8_t *reserve(struct session_object *session, PyObject *prefix, int kind, uint32_t count, uint64_t payload_bytes, int *code)
{
    const uint8_t *begin = (const uint8_t *)PyBytes_AsString(prefix);
    uint8_t *to = session->calls->reserve(session->producer, begin, kind, count, payload_bytes, code);
    if (to == NULL && *code == MS_PRODUCER_AGAIN && session->waiting > 0) { /* taking the answers frees their slots */
        take_answers(session);
        to = session->calls->reserve(session->producer, begin, kind, count, payload_bytes, code);
    }
    return to;
}

/* Wait for the last submitted put; return its code. The lock is held. */
static int wait_for_answer(struct session_object *session, int how)
{
    struct ms_producer *producer = session->producer;
    const struct ms_producer_calls *calls = session->calls;
    int code;
    if (how == 0 && calls->is_answered(producer, SPINS))
        return calls->await(producer, how); /* at once */
    Py_BEGIN_ALLOW_THREADS
    code = calls->await(producer, how);
    Py_END_ALLOW_THREADS
    return code;
}

/* Wait for the last submitted put and return its result; its future if the answer, the disk or slaves take long. *is_ok: it is that of
 * one message which is stored as promised. The lock is held. */
static PyObject *last_result(struct session_object *session, const struct put *put, int *is_ok)
{
    struct ms_producer *producer = session->producer;
    const struct ms_completion *answer = &producer->answer;
    const int code = wait_for_answer(session, put->how);
    *is_ok = code == 0 && answer->status == 0 && put->kind == MS_ENTRY_PUT;
    if (code == MS_PRODUCER_UNFINISHED) {
        struct pending_object *pending = new_object(future_class);
        if (pending != NULL)
            pending_submitted(pending, session, put, producer->sequence);
        return (PyObject *)pending;
    }
    if (*is_ok)
        return result_of(session->result_type, answer, put->topic, put->queue_id, session->store_host);
    return outcome_of(session, code, producer->stage == MS_STAGE_ANSWERED ? answer : NULL, put);
}

/* Return what last_result() found to the program, after a wait if it is a future; a put that is not PUT_OK may raise. Steals the
 * reference. The lock is not held. */
static PyObject *given(struct submitter_object *puts, PyObject *result, int64_t deadline_ns)
{
    if (result != NULL && Py_TYPE(result) == future_class)
        replace(&result, pending_await((struct pending_object *)result, deadline_ns));
    const int is_ok = result == NULL ? -1 : puts->raises ? PyObject_IsTrue(result)
                                                         : 1;
    if (is_ok == 0) /* it raises */
        replace(&result, PyObject_CallMethod(result, "raise_for_status", NULL));
    else if (is_ok < 0)
        Py_CLEAR(result);
    return result;
}

static struct put put_of(const struct submitter_object *puts, const struct session_object *session, const struct request *request)
{
    const int kind = request->pieces == NULL ? MS_ENTRY_PUT : MS_ENTRY_MANY;
    return (struct put){request->topic, NULL, request->queue_id, session->producer->submitted_ns, kind, puts->how};
}

static void fill_bodies(uint8_t *to, uint64_t lengths_bytes, const struct piece *pieces, Py_ssize_t count)
{
    uint32_t length = 0;
    memset(to + lengths_bytes - sizeof length, 0, sizeof length); /* the padding, if there is any */
    for (Py_ssize_t i = 0; i < count; i++) {
        length = (uint32_t)pieces[i].size;
        memcpy(to + (size_t)i * sizeof length, &length, sizeof length);
    }
    to += lengths_bytes;
    for (Py_ssize_t i = 0; i < count; i++) {
        memcpy(to, pieces[i].bytes, (size_t)pieces[i].size);
        to += pieces[i].size;
    }
}

/* Submit the bodies as one entry, if there is room; 0, or why nothing is submitted. */
static int submit_many(const struct submitter_object *puts, struct session_object *session, const struct request *request)
{
    const uint64_t lengths_bytes = ((uint64_t)request->bodies * 4 + 7) & ~(uint64_t)7, payload_bytes = lengths_bytes + request->sum;
    int code = MS_PRODUCER_CLOSED;
    uint8_t *to = NULL;
    if ((long long)payload_bytes <= puts->payload_bytes_max)
        to = reserve(session, request->prefix, MS_ENTRY_MANY, (uint32_t)request->bodies, payload_bytes, &code);
    if (to == NULL)
        return code;
    if (request->sum >= LARGE_COPY_BYTES) {
        Py_BEGIN_ALLOW_THREADS
        fill_bodies(to, lengths_bytes, request->pieces, request->bodies);
        Py_END_ALLOW_THREADS
    } else {
        fill_bodies(to, lengths_bytes, request->pieces, request->bodies);
    }
    session->calls->publish(session->producer);
    return 0;
}

/* Submit a put, if there is room; 0, or why nothing is submitted. The lock is held; session NULL: it has ended. */
static int submit_put(const struct submitter_object *puts, struct session_object *session, const struct request *request)
{
    int code = MS_PRODUCER_CLOSED;
    if (session == NULL)
        return code;
    if (request->pieces != NULL)
        return submit_many(puts, session, request);
    if (request->body_bytes > puts->body_bytes_max) /* the session may have changed, and with it the limit */
        return code;
    uint8_t *to = reserve(session, request->prefix, MS_ENTRY_PUT, 1, (uint64_t)request->body_bytes, &code);
    if (to == NULL)
        return code;
    memcpy(to, request->bytes, (size_t)request->body_bytes);
    session->calls->publish(session->producer);
    return 0;
}

/* Put what was read, and return the result to the program; if nothing can be submitted, do as `other`, the method of the slow path,
 * which waits for room or a session. Releases the request. */
static PyObject *put_request(struct front_object *front, struct request *request, PyObject *other, PyObject *const *arguments,
                             Py_ssize_t count, PyObject *names)
{
    struct submitter_object *puts = submitter_of(front); /* the producer keeps it alive */
    PyObject *lock, *result = NULL;
    struct session_object *session;
    if (take_session(puts, 1, &lock, &session) < 0) {
        release_request(request);
        return NULL;
    }
    const int is_submitted = submit_put(puts, session, request) == 0;
    int is_ok = 0;
    int64_t deadline_ns = 0;
    if (is_submitted) {
        const struct put put = put_of(puts, session, request);
        deadline_ns = put.submitted_ns + session->producer->timeout_ns;
        result = last_result(session, &put, &is_ok);
    }
    release_session(lock, session);
    if (is_submitted) {
        release_request(request);
        return is_ok ? result : given(puts, result, deadline_ns);
    }
    leave_request(request);
    return slow_path((PyObject *)front, other, arguments, count, names);
}

static PyObject *front_put(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names)
{
    struct front_object *front = (struct front_object *)object;
    struct request request;
    int found = read_put(front, arguments, count, names, &request);
    if (found <= 0)
        return found < 0 ? NULL : slow_path(object, name_put_any, arguments, count, names);
    return put_request(front, &request, name_put_any, arguments, count, names);
}

/* Wait a slice for an answer, which makes room: AGAIN, CLOSED if the slow path is due, or FAILED with an exception or the result
 * of a put that found no room in time. The lock is held. */
static int wait_for_room(struct submitter_object *puts, struct session_object *session, const struct request *request,
                         int64_t *deadline_ns, PyObject **refused)
{
    struct ms_producer *producer = session->producer;
    const uint64_t last = producer->sequence, acked = ms_load_acquire(&producer->session->acked);
    const int may = may_wait(puts);
    if (may < 0)
        return FAILED;
    if (may == 0 || acked >= last || session->producer == NULL) /* another thread waits, other operations use the slots, or this is a forked child */
        return MS_PRODUCER_CLOSED;
    const int64_t now_ns = ms_monotonic_ns();
    if (*deadline_ns == 0)
        *deadline_ns = now_ns + producer->timeout_ns;
    if (now_ns >= *deadline_ns) {
        *refused = PyObject_CallMethod((PyObject *)puts, "no_room", "OL", request->topic, request->queue_id);
        return FAILED;
    }
    const uint64_t until = (session->first > acked ? session->first : acked + 1) + ROOM_BATCH;
    int code;
    return wait_acked(session, until < last ? until : last, 0, 0, ROOM_SLICE_NS, &code) != 0 ? FAILED : MS_PRODUCER_AGAIN;
}

static PyObject *front_put_async(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names)
{
    struct front_object *front = (struct front_object *)object;
    struct request request;
    int found = read_put(front, arguments, count, names, &request);
    if (found < 0)
        return NULL;
    struct submitter_object *puts = submitter_of(front); /* the producer keeps it alive */
    if (found == 0 || PySequence_Size(puts->queued) > 0) {
        leave_request(&request);
        return slow_path(object, name_async_any, arguments, count, names);
    }
    PyObject *refused = NULL;
    struct pending_object *pending = new_object(future_class);
    int64_t deadline_ns = 0;
    int code = pending == NULL ? FAILED : MS_PRODUCER_AGAIN;
    if (pending != NULL)
        pending->raises = puts->raises;
    while (code == MS_PRODUCER_AGAIN) {
        PyObject *lock;
        struct session_object *session;
        int taken = take_session(puts, 0, &lock, &session);
        code = taken < 0 ? FAILED : MS_PRODUCER_CLOSED;
        if (taken > 0) {
            code = submit_put(puts, session, &request);
            const struct put put = code == 0 ? put_of(puts, session, &request) : (struct put){0};
            if (code == 0)
                pending_submitted(pending, session, &put, session->producer->sequence);
            else if (code == MS_PRODUCER_AGAIN)
                code = wait_for_room(puts, session, &request, &deadline_ns, &refused);
            release_session(lock, session);
        }
    }
    if (code == 0) {
        release_request(&request);
        return (PyObject *)pending;
    }
    leave_request(&request);
    Py_XDECREF((PyObject *)pending);
    return code == FAILED ? refused : slow_path(object, name_async_any, arguments, count, names);
}

/* Return the bodies of a list or tuple of bytes of at most `most` each; NULL without an exception for anything else. */
static struct piece *read_bodies(PyObject *bodies, long long most, Py_ssize_t *count, uint64_t *sum)
{
    int is_list = PyList_CheckExact(bodies);
    *count = is_list ? PyList_Size(bodies) : PyTuple_Size(bodies);
    *sum = 0;
    struct piece *pieces = *count > 0 ? malloc((size_t)*count * sizeof *pieces) : NULL;
    if (pieces == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < *count; i++) {
        PyObject *body = is_list ? PyList_GetItem(bodies, i) : PyTuple_GetItem(bodies, i);
        char *bytes;
        if (!PyBytes_CheckExact(body) || PyBytes_AsStringAndSize(body, &bytes, &pieces[i].size) != 0 || pieces[i].size > most) {
            while (i-- > 0)
                Py_DECREF(pieces[i].owner);
            free(pieces);
            return NULL;
        }
        pieces[i].owner = Py_NewRef(body);
        pieces[i].bytes = bytes;
        *sum += (uint64_t)pieces[i].size;
    }
    return pieces;
}

static PyObject *front_put_many(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names)
{
    struct front_object *front = (struct front_object *)object;
    struct request request;
    int found = read_request(front, arguments, count, names, &request);
    if (found < 0)
        return NULL;
    if (found && (PyList_CheckExact(request.body) || PyTuple_CheckExact(request.body)))
        request.pieces = read_bodies(request.body, submitter_of(front)->body_bytes_max, &request.bodies, &request.sum);
    if (request.pieces == NULL) {
        leave_request(&request);
        return slow_path(object, name_many_any, arguments, count, names);
    }
    return put_request(front, &request, name_many_any, arguments, count, names);
}

#define OPTIONS "queue_id=None, tags=None, keys=None, properties=None, flag=0"
#define MORE ", delay_level=0, unique_key=None, wait=True, timeout_s=None, deliver_at=None, sharding_key=None"
static PyMethodDef methods[] = {
    {"put", (PyCFunction)(void (*)(void))front_put, METH_FASTCALL | METH_KEYWORDS,
     "put($self, /, topic, body, *, " OPTIONS MORE ", once=False)\n--\n\nStore one message and return where it is, once it is as durable as the flush "
     "mode promises."},
    {"put_async", (PyCFunction)(void (*)(void))front_put_async, METH_FASTCALL | METH_KEYWORDS,
     "put_async($self, /, topic, body, *, " OPTIONS MORE ")\n--\n\nLike put(), but return a Future of the PutResult at once. It can be awaited."},
    {"put_many", (PyCFunction)(void (*)(void))front_put_many, METH_FASTCALL | METH_KEYWORDS,
     "put_many($self, /, topic, bodies, *, " OPTIONS ", delay_level=0, wait=True, timeout_s=None, deliver_at=None, sharding_key=None)\n--\n\n"
     "Store many messages in one queue, all or none, with contiguous queue offsets and one answer."},
    {"_follow", front_follow, METH_NOARGS, "_follow($self, /)\n--\n\nForget what was remembered of an engine that was replaced."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"_puts", T_OBJECT_EX, offsetof(struct front_object, puts), READONLY, NULL},
    {"_prefixes", T_OBJECT_EX, offsetof(struct front_object, prefixes), READONLY, NULL},
    {"_turns", T_OBJECT_EX, offsetof(struct front_object, turns), READONLY, NULL},
    {"_choice", T_OBJECT, offsetof(struct front_object, choice), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

/* ProducerFront(submitter) */
static int front_init(PyObject *object, PyObject *arguments, PyObject *names)
{
    struct front_object *front = (struct front_object *)object;
    PyObject *puts;
    if (!PyArg_ParseTuple(arguments, "O!:ProducerFront", submitter_type, &puts))
        return -1;
    if (front->puts != NULL) {
        PyErr_SetString(PyExc_TypeError, "a producer is made once"); /* a put may be in progress in another thread */
        return -1;
    }
    replace(&front->prefixes, PyDict_New());
    replace(&front->turns, PyDict_New());
    if (front->prefixes == NULL || front->turns == NULL)
        return -1;
    replace(&front->puts, Py_NewRef(puts));
    return 0;
}

static int front_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct front_object *front = (struct front_object *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(front->puts);
    Py_VISIT(front->prefixes);
    Py_VISIT(front->turns);
    Py_VISIT(front->choice);
    return 0;
}

static void front_dealloc(PyObject *object)
{
    struct front_object *front = (struct front_object *)object;
    PyObject_GC_UnTrack(object);
    Py_CLEAR(front->puts);
    Py_CLEAR(front->prefixes);
    Py_CLEAR(front->turns);
    Py_CLEAR(front->choice);
    Py_CLEAR(front->turn);
    Py_CLEAR(front->turn_topic);
    Py_CLEAR(front->topic);
    Py_CLEAR(front->queue);
    Py_CLEAR(front->tags);
    Py_CLEAR(front->prefix);
    free_object(object);
}

static PyType_Slot slots[] = {
    {Py_tp_init, front_init},
    {Py_tp_dealloc, front_dealloc},
    {Py_tp_traverse, front_traverse}, /* no Py_tp_clear: a put may be running in a callback */
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

/* ---- SubmitterFront */
#define AT(field) offsetof(struct submitter_object, field)
static PyMemberDef submitter_members[] = {
    {"lock", T_OBJECT_EX, AT(lock), 0, NULL},
    {"front", T_OBJECT_EX, AT(session), 0, NULL},
    {"queued_puts", T_OBJECT_EX, AT(queued), 0, NULL},
    {"body_bytes_max", T_LONGLONG, AT(body_bytes_max), 0, NULL},
    {"payload_bytes_max", T_LONGLONG, AT(payload_bytes_max), 0, NULL},
    {"waits", T_INT, AT(how), 0, NULL},
    {"raises", T_BOOL, AT(raises), 0, NULL},
    {"sessions", T_LONGLONG, AT(sessions), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *submitter_new(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    struct submitter_object *puts = new_object(type);
    if (puts == NULL)
        return NULL;
    puts->session = Py_NewRef(Py_None);
    puts->lock = lock_new(lock_type, NULL, NULL);
    puts->queued = PyTuple_New(0);
    if (puts->lock == NULL || puts->queued == NULL)
        Py_CLEAR(puts);
    return (PyObject *)puts;
}

static int submitter_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct submitter_object *puts = (struct submitter_object *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(puts->session);
    Py_VISIT(puts->queued);
    return 0;
}

static void submitter_dealloc(PyObject *object)
{
    struct submitter_object *puts = (struct submitter_object *)object;
    PyObject_GC_UnTrack(object);
    Py_CLEAR(puts->session);
    Py_CLEAR(puts->queued);
    Py_CLEAR(puts->lock);
    free_object(object);
}

static PyType_Slot submitter_slots[] = {
    {Py_tp_new, submitter_new},
    {Py_tp_dealloc, submitter_dealloc},
    {Py_tp_traverse, submitter_traverse},
    {Py_tp_members, submitter_members},
    {0, NULL},
};

/* ---- Turn */
static PyObject *turn_take_one(PyObject *object, PyObject *none)
{
    struct turn_object *turn = (struct turn_object *)object;
    if (turn->queues <= 0) {
        PyErr_SetString(PyExc_ValueError, "a topic has at least one queue");
        return NULL;
    }
    return PyLong_FromLongLong(turn_take(turn));
}

static PyMemberDef turn_members[] = {
    {"queues", T_LONGLONG, offsetof(struct turn_object, queues), 0, "How many queues the topic has to write."},
    {"next", T_ULONGLONG, offsetof(struct turn_object, next), 0, "The next queue, before the remainder by `queues`."},
    {"until_ns", T_LONGLONG, offsetof(struct turn_object, until_ns), 0, "When `queues` must be read again, on the monotonic clock."},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef turn_methods[] = {{"take", turn_take_one, METH_NOARGS, "Return the next queue."}, {NULL, NULL, 0, NULL}};
static PyType_Slot turn_slots[] = {{Py_tp_dealloc, free_object}, {Py_tp_members, turn_members}, {Py_tp_methods, turn_methods}, {0, NULL}};

int producer_init(PyObject *module)
{
    name_queue_id = PyUnicode_InternFromString("queue_id");
    name_tags = PyUnicode_InternFromString("tags");
    name_put_any = PyUnicode_InternFromString("_put_any");
    name_async_any = PyUnicode_InternFromString("_put_async_any");
    name_many_any = PyUnicode_InternFromString("_put_many_any");
    zero = PyLong_FromLong(0);
    const unsigned int flags = Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC;
    PyTypeObject *front_type;
    return add_type(module, &submitter_type, "pyengine._front.SubmitterFront", sizeof(struct submitter_object), flags, submitter_slots) != 0 ||
                   add_type(module, &turn_type, "pyengine._front.Turn", sizeof(struct turn_object), 0, turn_slots) != 0
               ? -1
               : add_type(module, &front_type, "pyengine._front.ProducerFront", sizeof(struct front_object), flags, slots);
}
