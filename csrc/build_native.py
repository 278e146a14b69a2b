"""Builds pyengine._native from the C concepts in this folder.

Each concept X is X.cdef.h (what Python sees: plain declarations, no directives
but #define NAME INTEGER and includes), X.c unless it is only a layout, and X.h if C sees more, such as
static asserts. cdef() and the compiler read the same X.cdef.h, so they cannot disagree.

Set PYENGINE_SANITIZE=address to build with ASan and UBSan (tests/test_sanitizers.py does), and
PYENGINE_BUILD_FAILPOINTS=1 to build with the failpoints of the C code (tests/faults/mutants.py does).
"""

import os
import re
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
# setuptools wants source paths relative to the folder of setup.py.
SOURCE_FOLDER = os.path.relpath(HERE, os.getcwd())

# Concepts in order of dependence: a struct must be declared before it is used.
CONCEPTS = (
    "layout",
    "failpoint",
    "control",
    "arrivals",
    "watch",
    "pulse",
    "latch",
    "flush",
    "queue_table",
    "store_stats",
    "recorder",
    "shared_text",
    "blocked_reasons",
    "record",
    "session",
    "session_guard",
    "cleaning",
    "replication",
    "crc32",
    "scan",
    "sequence",
    "group_commit",
    "entry",
    "producer",
    "sends",
    "seal",
    "ha_links",
    "ha_follow",
    "cpu",
    "stream",
    "pool_commit",
    "light_queues",
    "writer",
    "log_tail",
    "raw_append",
    "take_entry",
    "queue_keys",
    "consume_queue",
    "index_file",
    "dispatch",
    "reput",
    "store_check",
    "columns",
    "tally",
    "process",
)

WARNINGS = ["-Wall", "-Wextra", "-Werror=implicit-function-declaration"]


def _flags() -> tuple[list[str], list[str]]:
    if os.environ.get("PYENGINE_SANITIZE") == "address":
        sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"]
        return ["-std=gnu11", "-O1", *WARNINGS, *sanitize], sanitize
    return ["-std=gnu11", "-O2", "-g", *WARNINGS], []


def make_builder() -> FFI:
    builder = FFI()
    for concept in CONCEPTS:
        builder.cdef(re.sub(r"^#(pragma|include) .*", "", (HERE / f"{concept}.cdef.h").read_text(), flags=re.MULTILINE))
    compile_flags, link_flags = _flags()
    headers = ["base.h", *(f"{concept}{'.h' if (HERE / f'{concept}.h').exists() else '.cdef.h'}" for concept in CONCEPTS)]
    builder.set_source(
        "pyengine._native",
        "\n".join(f'#include "{header}"' for header in headers),
        sources=[os.path.join(SOURCE_FOLDER, f"{concept}.c") for concept in CONCEPTS if (HERE / f"{concept}.c").exists()],
        include_dirs=[str(HERE)],
        extra_compile_args=compile_flags,
        define_macros=[("MS_FAILPOINTS", "1")] if os.environ.get("PYENGINE_BUILD_FAILPOINTS") == "1" else [],
        extra_link_args=link_flags,
        libraries=["rt", "pthread"],
        depends=sorted(str(path) for path in HERE.glob("*.h")),
    )
    return builder


ffibuilder = make_builder()

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
