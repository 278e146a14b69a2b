#include "front.h"

/* Types and names are in static variables, so only one interpreter can use the module. */
static int execute(PyObject *module)
{
    static int is_loaded;
    if (is_loaded || PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
        PyErr_SetString(PyExc_ImportError, "pyengine._front is loaded once, by the main interpreter: use threads or processes");
        return -1;
    }
    is_loaded = 1;
    return result_init(module) != 0 || lock_init(module) != 0 || pending_init(module) != 0 || session_init(module) != 0 ||
                   producer_init(module) != 0 || message_init(module) != 0 || read_queue_init(module) != 0
               ? -1
               : 0;
}
static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "pyengine._front",
    .m_doc = "What a program calls for each message: puts, their results, and the messages of a queue as C types.",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__front(void)
{
    return PyModuleDef_Init(&definition);
}
