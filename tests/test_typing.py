"""The public names as mypy sees them in a user's program: results have their types, and misspelt names are errors."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import pyengine
from fix_cli import SOURCES
from waiting import scaled_timeout_s

RIGHT = """
import asyncio
import pyengine

async def put(producer: pyengine.Producer) -> int:
    result = await producer.put_async("orders", b"one")
    if not result.ok:
        raise RuntimeError(result.reason)
    results = await asyncio.gather(producer.put_async("orders", b"two"), producer.put_async("orders", b"three"))
    return result.queue_offset + results[0].queue_offset

def answered(future: pyengine.PutFuture[pyengine.PutResult]) -> None:
    print(future.is_answered, future.result().msg_id)

def wait(future: pyengine.PutFuture[pyengine.PutResult], many: pyengine.PutFuture[pyengine.PutManyResult]) -> int:
    future.add_done_callback(answered)
    future.add_done_callback(lambda done: print(done.result().msg_id))
    return future.result(timeout=1).physical_offset + many.result().first_queue_offset

def refused(error: pyengine.PutError) -> str:
    return "in the log" if isinstance(error, pyengine.PutNotDurableError) else error.result.reason

def annotate({names}) -> None: ...
"""
WRONG = """
import pyengine

async def wrong(producer: pyengine.Producer) -> None:
    (await producer.put_async("orders", b"")).offset  # error
    (await producer.put_many_async("orders", [b""])).msg_id  # error
    producer.put_async("orders", b"").result().offset  # error
    producer.put("orders", "text")  # error
    pyengine.conect("store")  # error
    pyengine.connect("store", refusals="ignore")  # error
"""


@pytest.mark.mypy
def test_a_users_program_is_checked_against_the_types(tmp_path):
    names = [name for name in pyengine.__all__ if name[0].isupper()]
    annotated = ", ".join(f"a_{name}: pyengine.{name}{'[pyengine.PutResult]' if name == 'PutFuture' else ''}" for name in names)
    (tmp_path / "right.py").write_text(RIGHT.replace("{names}", annotated))
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\nfollow_imports = silent\n[mypy-pyengine.*]\nignore_errors = True\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "right.py", "wrong.py"], cwd=tmp_path, capture_output=True, text=True,
                          env={"MYPYPATH": str(SOURCES), "PATH": ""}, timeout=scaled_timeout_s(240), check=False)
    found = [(name, int(line)) for name, line in re.findall(r"^(\w+\.py):(\d+): error", done.stdout, re.MULTILINE)]
    wanted = [("wrong.py", number) for number, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# error")]
    assert found == wanted, done.stdout + done.stderr


def test_names_of_the_module_are_loaded_when_they_are_used():
    for name in pyengine.__all__:
        assert getattr(pyengine, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        pyengine.conect  # noqa: B018 - the access is what is tested
