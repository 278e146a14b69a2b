/* The turn of one topic: which of its queues is next. */
#include "front.h"

PyTypeObject *turn_type;

int turn_is_current(const struct turn_object *turn)
{
    struct timespec now; /* to 4 ms, for a tenth of what the exact clock costs */
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return turn->queues > 0 && (long long)now.tv_sec * 1000000000 + now.tv_nsec < turn->until_ns;
}

long long turn_take(struct turn_object *turn)
{
    return (long long)(turn->next++ % (unsigned long long)turn->queues);
}

static PyObject *turn_take_one(PyObject *object, PyObject *none)
{
    struct turn_object *turn = (struct turn_object *)object;
    if (turn->queues <= 0) {
        PyErr_SetString(PyExc_ValueError, "a topic has at least one queue");
        return NULL;
    }
    return PyLong_FromLongLong(turn_take(turn));
}

#define AT(field) offsetof(struct turn_object, field)
static PyMemberDef members[] = {
    {"queues", T_LONGLONG, AT(queues), 0, "How many queues the topic has to write."},
    {"next", T_ULONGLONG, AT(next), 0, "The next queue, before the remainder by `queues`."},
    {"until_ns", T_LONGLONG, AT(until_ns), 0, "When `queues` must be read again, on the monotonic clock."},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef methods[] = {{"take", turn_take_one, METH_NOARGS, "Return the next queue."}, {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {{Py_tp_dealloc, free_object}, {Py_tp_members, members}, {Py_tp_methods, methods}, {0, NULL}};

int turn_init(PyObject *module)
{
    turn_type = add_type(module, "pyengine._front.Turn", sizeof(struct turn_object), 0, slots);
    return turn_type == NULL ? -1 : 0;
}
