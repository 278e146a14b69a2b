"""What tests fork is what an exec would have started, as far as another process can see."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forked

WORDS = [sys.executable, "-P", "-m", "pyengine.workers.flusher"]


@pytest.fixture
def environment():
    return forked.ENVIRONMENT | {"PYENGINE_OF_THIS_TEST": "here"}


def said_of(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/{name}").read_text().strip("\0").split("\0")


def test_a_forked_worker_has_its_command_line_environment_and_exit_code(tmp_path, environment):
    words = [*WORDS, str(tmp_path), "--wait", "60"]
    worker = forked.start(words, environment)
    try:
        assert isinstance(worker, forked.ForkedProcess) and worker.poll() is None
        while said_of(worker.pid, "cmdline") != words:  # until it has become what it is
            assert worker.poll() is None
        assert "PYENGINE_OF_THIS_TEST=here" in said_of(worker.pid, "environ")
        assert {int(name) for name in os.listdir(f"/proc/{worker.pid}/fd")} & {0, 1, 2} == {0, 1, 2}
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.01)
    finally:
        worker.kill()
    assert worker.wait(30) == -signal.SIGKILL and worker.returncode == worker.poll() == -signal.SIGKILL


def test_the_error_text_and_exit_code_of_a_forked_worker_equal_those_of_a_plain_one(tmp_path, environment):
    worker = forked.start([*WORDS, str(tmp_path), "--wait", "0.1"], environment)
    code, (_, said) = worker.wait(60), worker.communicate()
    plain = subprocess.run([*WORDS, str(tmp_path), "--wait", "0.1"], env=environment, stderr=subprocess.PIPE, text=True, timeout=60)
    assert code == plain.returncode != 0
    assert said.partition("] ")[2] == plain.stderr.partition("] ")[2] != ""


@pytest.mark.parametrize("change", [{"HOME": "/elsewhere"}, {"PYTHONPATH": "/elsewhere"}, {"LD_PRELOAD": ""}])
def test_another_environment_takes_a_new_interpreter(environment, change):
    assert forked.suits(environment) and not forked.suits(environment | change)


def test_variables_of_a_spark_session_leave_the_environment_suitable_for_a_fork(environment):
    assert forked.suits(environment | {"SPARK_BUFFER_SIZE": "65536", "SPARK_AUTH_SOCKET_TIMEOUT": "15"})
