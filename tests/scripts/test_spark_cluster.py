"""scripts/spark_cluster.sh: a master and workers on the loopback address, and nothing of them when it has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from waiting import eventually, scaled_timeout_s

pytestmark = [pytest.mark.java, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[2] / "scripts" / "spark_cluster.sh"
LISTENING = """
import json, os, psutil, sys
ours = psutil.Process(os.getppid()).children(recursive=True)
print(json.dumps([[c.laddr.ip for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
                  for p in ours if p.pid != os.getpid()]))
print(os.environ["PYENGINE_SPARK_MASTER"])
sys.exit(7)
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHON": sys.executable}


def ours(folder: Path) -> list[psutil.Process]:
    """The cluster's processes: each has the folder in its arguments."""
    return [process for process in psutil.process_iter(["cmdline"])
            if any(f"{folder}/" in word for word in process.info["cmdline"] or ()) and process.pid != os.getpid()]


@pytest.mark.ci
def test_a_command_runs_beside_it_on_loopback_and_nothing_stays(tmp_path):
    folder = tmp_path / "cluster with space"
    done = subprocess.run([SCRIPT, "--workers", "1", "--memory", "512m", "--folder", folder, sys.executable, "-c", LISTENING],
                          env=environment(), capture_output=True, text=True, timeout=scaled_timeout_s(300), stdin=subprocess.DEVNULL)
    assert done.returncode == 7, done.stderr
    listening, url = done.stdout.splitlines()
    daemons = [addresses for addresses in json.loads(listening) if addresses]
    assert len(daemons) == 2 and {address for addresses in daemons for address in addresses} <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert url.startswith("spark://127.0.0.1:")
    assert not ours(folder)
    assert "Successfully registered with master" in (folder / "worker-1.log").read_text()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_without_a_command_it_runs_until_it_is_stopped_however(tmp_path, number):
    with subprocess.Popen([SCRIPT, "--folder", tmp_path / "cluster"], env=environment(), stdout=subprocess.PIPE,
                          text=True, start_new_session=True) as script:
        try:
            assert script.stdout.readline().startswith("master: spark://127.0.0.1:")
            assert len(ours(tmp_path / "cluster")) >= 3
        finally:
            script.send_signal(number)
        assert script.wait(60) == {signal.SIGINT: 0, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    eventually(lambda: not ours(tmp_path / "cluster"), "the daemons have ended", timeout_s=60)


def test_wrong_arguments_are_named():
    refused("--workers", "0", code=2, sentence="give at least one worker")


@pytest.mark.long
def test_a_daemon_that_does_not_start_ends_the_others(tmp_path):
    refused("--memory", "lots", "--workers", "1", "--folder", tmp_path, code=1, sentence="the worker-1 ended; its log ends:")
    assert not ours(tmp_path)


def refused(*words: object, code: int, sentence: str) -> None:
    done = subprocess.run([SCRIPT, *words, "true"], env=environment(), capture_output=True, text=True, timeout=scaled_timeout_s(300))
    assert done.returncode == code and sentence in done.stderr
