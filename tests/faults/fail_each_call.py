"""`pyengine recover` with one system call failing, for each call in turn; run under failing_calls.c by its test.

    LD_PRELOAD=failing.so python fail_each_call.py STORE SCRATCH CASES LIMIT

CASES is JSON: a list of [call, errno name]. Each case takes copies of STORE: the first call fails, then the second,
until a recovery gets by with fewer (or LIMIT is reached). Prints, as JSON lines, what was seen: call, errno, n, the
exit code and stderr of the recovery that failed, exit code and document of the one after it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import sys
from pathlib import Path

from pyengine.cli.main import main
from pyengine.cli.repair import recover as _imported_now  # noqa: F401  (nothing is imported once a call may fail)

SHORT = -1
SHIM = ctypes.CDLL(None)


def child(arguments: list[str], arm: tuple[str, int, int] | None, folder: Path, output: Path) -> tuple[int, int, str, str]:
    """(exit code or -signal, how many of the calls came, stdout, stderr) of one command in a forked process."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            if arm is not None:
                SHIM.fail_at(str(folder).encode(), arm[0].encode(), ctypes.c_long(arm[1]), arm[2])
            try:
                main(arguments)
            except SystemExit as end:
                code = int(end.code or 0)
            (output / "count").write_text(str(SHIM.fail_count()))
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    counted = output / "count"
    count = int(counted.read_text()) if counted.exists() else 0
    counted.unlink(missing_ok=True)
    return code, count, (output / "out").read_text(), (output / "err").read_text()


def run(store: Path, scratch: Path, cases: list[list[str]], limit: int) -> None:
    SHIM.fail_count.restype = ctypes.c_long
    copy, output = scratch / "copy", scratch / "output"
    output.mkdir(parents=True)
    for call, name in cases:
        error = SHORT if name == "SHORT" else getattr(errno, name)
        for n in range(1, limit + 1):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(store, copy, copy_function=shutil.copy2)
            code, count, _, stderr = child(["recover", str(copy)], (call, n, error), copy, output)
            again, _, document, second_stderr = child(["recover", str(copy), "--json"], None, copy, output)
            print(json.dumps({"call": call, "errno": name, "n": n, "came": count >= n, "code": code, "stderr": stderr,
                              "again": again, "document": document, "again_stderr": second_stderr}), flush=True)
            if count < n:
                break


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4]))
