"""A program whose limit of open files leaves a call from 0 to 11 free descriptors: it must leave none of them open."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from pyengine.engine.kinds import child_environment
from waiting import scaled_timeout_s

_PROGRAM = """
import gc, os, resource, sys
import pyengine
root = sys.argv[1]
{first}
first, limits = os.dup(0), resource.getrlimit(resource.RLIMIT_NOFILE)
os.close(first)
gc.disable()
for free in range(12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + free, limits[1]))
    try:
{call}
    except pyengine.EngineError:
        pass
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert os.dup(0) == first, f"with {{free}} descriptors one is left open"
    os.close(first)
"""


def call_with_few_files(store, first: str, call: str) -> str:
    """Run `first`, which imports what is imported late, then `call` with few descriptors; both know `root`. Return what they print."""
    program = _PROGRAM.format(first=textwrap.dedent(first), call=textwrap.indent(textwrap.dedent(call), " " * 8))
    done = subprocess.run([sys.executable, "-c", program, str(store)], env=child_environment(), capture_output=True, text=True,
                          timeout=scaled_timeout_s(60), check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout
