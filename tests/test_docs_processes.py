"""docs/processes.md is true: its blocks run, with the real servers, and leave no engine behind."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import pyengine
from pyengine.events import Event
from pyengine.ipc.store_lock import living_kinds
from test_docs import blocks_of, reader  # noqa: F401
from waiting import eventually, scaled_timeout_s


@pytest.fixture
def servers(reader):  # noqa: F811
    """A Reader that finds the servers' commands."""
    reader.environment["PATH"] = f"{Path(sys.executable).parent}:{reader.environment['PATH']}"
    return reader


def wait_stopped(store):
    eventually(lambda: living_kinds(store) == [], "the engine has stopped")
    assert not (store / "abort").exists()


def bodies(store):
    with pyengine.open_store(store) as opened:
        return [message.body for message in opened.get_message("orders", 0, 0).messages]


FIRST, APP, GUNICORN, SERVICE, UVICORN, JOBS, CELERY, CELL, SERVE = blocks_of("docs/processes.md")


@pytest.mark.ci
@pytest.mark.parametrize(("module", "program", "shell", "answer"), [
    ("app.py", APP, GUNICORN, "0"), ("service.py", SERVICE, UVICORN, '{"offset":0}')], ids=["gunicorn", "uvicorn"])
def test_the_processes_of_a_server_share_an_engine(servers, module, program, shell, answer):
    (servers.folder / module).write_text(program.text)
    assert servers.run(shell).splitlines()[-1] == answer
    wait_stopped(servers.folder / "my-store")
    assert bodies(servers.folder / "my-store") == [b"one apple"]
    assert (servers.folder / "my-store" / "engine.log").read_text().count(Event.ENGINE_RECOVERED.name) == 1


@pytest.mark.ci
def test_the_tasks_of_celery_share_an_engine(servers):
    (servers.folder / "jobs.py").write_text(JOBS.text)
    servers.run(replace(CELERY, text=CELERY.text.replace("sleep 5", f"sleep {scaled_timeout_s(5):.0f}")))
    wait_stopped(servers.folder / "my-store")
    assert bodies(servers.folder / "my-store") == [b"1"]


def test_the_other_blocks_of_the_page_run(servers):
    for block in (FIRST, CELL):
        assert servers.run(block) == "running PUT_OK\n"
        wait_stopped(servers.folder / "my-store")
    servers.environment |= {"PYENGINE_GATEWAY_NAMESRV_PORT": "0", "PYENGINE_GATEWAY_BROKER_PORT": "0"}  # not another test's
    assert "PUT_OK" in servers.run(SERVE)
    wait_stopped(servers.folder / "my-store")
