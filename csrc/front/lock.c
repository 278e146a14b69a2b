/* A producer's lock, taken by C for a put and by Python with `with`; a thread that waits for it still handles signals. */
#include "front.h"

#define TURN_US 50000

struct lock_object {
    PyObject_HEAD
    PyThread_type_lock lock;
    unsigned long owner; /* the thread that has it; 0: none */
};
PyTypeObject *lock_type;

PyObject *lock_new(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    struct lock_object *own = new_object(type);
    if (own == NULL)
        return NULL;
    own->lock = PyThread_allocate_lock();
    if (own->lock == NULL) {
        Py_DECREF(own);
        return PyErr_NoMemory();
    }
    return (PyObject *)own;
}

int lock_try(PyObject *lock)
{
    struct lock_object *own = (struct lock_object *)lock;
    if (!PyThread_acquire_lock(own->lock, NOWAIT_LOCK))
        return 0;
    own->owner = PyThread_get_thread_ident();
    return 1;
}

int lock_take(PyObject *lock)
{
    struct lock_object *own = (struct lock_object *)lock;
    if (!lock_try(lock)) {
        if (own->owner == PyThread_get_thread_ident()) {
            PyErr_SetString(PyExc_RuntimeError, "a signal handler or finalizer within a call of this producer cannot put");
            return -1;
        }
        for (PyLockStatus found = PY_LOCK_FAILURE; found != PY_LOCK_ACQUIRED;) {
            Py_BEGIN_ALLOW_THREADS
            found = PyThread_acquire_lock_timed(own->lock, TURN_US, 1);
            Py_END_ALLOW_THREADS
            if (found != PY_LOCK_ACQUIRED && PyErr_CheckSignals() != 0)
                return -1;
        }
        own->owner = PyThread_get_thread_ident();
    }
    return 0;
}

void lock_release(PyObject *lock)
{
    struct lock_object *own = (struct lock_object *)lock;
    own->owner = 0;
    PyThread_release_lock(own->lock);
}

static void lock_dealloc(PyObject *object)
{
    struct lock_object *own = (struct lock_object *)object;
    if (own->lock != NULL) {
        if (own->owner != 0)
            PyThread_release_lock(own->lock);
        PyThread_free_lock(own->lock);
    }
    free_object(object);
}

static PyObject *lock_enter(PyObject *lock, PyObject *none)
{
    if (lock_take(lock) != 0)
        return NULL;
    return Py_NewRef(lock);
}

static PyObject *lock_exit(PyObject *lock, PyObject *arguments)
{
    if (((struct lock_object *)lock)->owner != PyThread_get_thread_ident()) {
        PyErr_SetString(PyExc_RuntimeError, "the lock is not held by this thread");
        return NULL;
    }
    lock_release(lock);
    Py_RETURN_NONE;
}

static PyObject *lock_locked(PyObject *lock, PyObject *none)
{
    return PyBool_FromLong(((struct lock_object *)lock)->owner != 0);
}

static PyMethodDef methods[] = {
    {"__enter__", lock_enter, METH_NOARGS, NULL},
    {"__exit__", lock_exit, METH_VARARGS, NULL},
    {"locked", lock_locked, METH_NOARGS, "Whether a thread holds it."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, lock_new},
    {Py_tp_dealloc, lock_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "A lock for `with`, which C takes too. Nothing of Python runs between taking it and the block."},
    {0, NULL},
};

int lock_init(PyObject *module)
{
    return add_type(module, &lock_type, "pyengine._front.Lock", sizeof(struct lock_object), 0, slots);
}
