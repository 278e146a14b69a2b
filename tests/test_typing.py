"""The public names as mypy and pyright see them in a user's program: results have their types, misspelt names and keywords are errors."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import needs
import pyengine
from fix_cli import SOURCES
from pyengine.client.consumer import RetryOptions
from pyengine.client.outgoing import PutAsyncOptions, PutManyOptions, PutOptions
from pyengine.engine_config import SETTINGS
from waiting import scaled_timeout_s

RIGHT = """
import asyncio
import datetime
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

def settings(store: str, small: pyengine.EngineSettings) -> None:
    with pyengine.Engine(store, shared=True, **small) as engine:
        print(engine.state, engine.connect(timeout_s=1, ring_bytes=1 << 20, put_timeout_ms="5s"))
    pyengine.Engine(store, mapped_file_size_commit_log_bytes="16MiB", gateway_enable=True, transient_store_pool_enable="false")
    options: pyengine.ConsumeOptions = {"tags": "new", "from_": "last", "timeout_s": 3}
    pyengine.run_consumer(store, "orders", "billing", print, concurrency=4, **options)
    pyengine.open_store(store, max_transfer_count_on_message_in_memory=64)

async def block(store: str) -> str:
    async with pyengine.Engine(store) as engine, engine.connect() as producer:
        return (await producer.put_async("orders", b"")).msg_id

def parts(store: str) -> int:
    return sum(part.count_rows() for part in pyengine.arrow.dataset(store, ["orders"], tags="new").splits(1 << 28))

def times(message: pyengine.Message) -> str:
    return f"{message.store_time - message.born_time} {message.born_time.isoformat()}"

def values(store: str, producer: pyengine.Producer, numbers: pyengine.Topic[int]) -> int:
    orders = pyengine.Topic("orders", dict, codec="msgspec")
    print(numbers.put(producer, 1).msg_id, orders.put_many(producer, [{}]).count, orders.name)
    with numbers.consume(store, group="billing", tags="new") as consumer:
        consumer.ack(consumer.pull())
        return sum(each.value + each.message.queue_offset for each in consumer)

def bodies(producer: pyengine.Producer, made: list[str], typed: pyengine.Topic[int]) -> None:
    with open("body", "rb") as file, memoryview(bytearray(8)) as view:
        producer.put("orders", view)
        producer.put_async("orders", bytearray(file.read())).result()
        with producer.transaction() as block:
            block.put("orders", bytearray(b"x"))
    producer.put_many("orders", (each.encode() for each in made))
    producer.put_many_async("orders", iter([bytearray(b"x")]))
    producer.put_many("orders", (b"x", view))
    producer.put_batch("orders", (pyengine.BatchMessage(bytearray(b"x")) for _ in made))
    producer.put_batch("orders", [b"one", pyengine.BatchMessage(b"two")])
    producer.put_many("orders", {"a": b"x"}.values())
    typed.put_many(producer, range(4), keys=["a"], delay_level=1)
    typed.put(producer, 1, tags="new", unique_key="k", once=True, timeout_s=2)
    typed.put_async(producer, 1, tags="new", unique_key="k")

def choices(store: str, consumer: pyengine.TypedConsumer[int], value: pyengine.Typed[int], level: pyengine.ReadLevel) -> None:
    pyengine.Engine(store, flush_disk_type="SYNC_FLUSH", broker_role="SYNC_MASTER", gateway_tls_mode="enforcing", gateway_enable="yes")
    pyengine.Topics(store).create("orders", perm="r")
    pyengine.Topics(store).update("orders", perm=6)
    with pyengine.open_store(store) as reader:
        print(reader.queue_range("orders", 0, level), reader.queue_range("orders", 0, "written"))
    consumer.retry(value, reason="not now", delay_s=0.5)

def later(producer: pyengine.Producer, consumer: pyengine.Consumer, message: pyengine.Message, after: datetime.timedelta) -> None:
    producer.put_many("orders", [b""], deliver_at=after)
    producer.put_batch("orders", [pyengine.BatchMessage(b"", deliver_at=after)], delay_level=1)
    producer.put("orders", b"", unique_key="k", once=True)
    consumer.retry(message, delay_s=0.5)
    pyengine.run_consumer("store", "orders", "billing", print, backoff=lambda times: 2.0 ** times)

def topics(store: str) -> list[str]:
    return [each.topic for each in pyengine.Topics(store).list(sizes=True) if each.config is None or each.config.perm == 6]

def annotate({names}) -> None: ...
"""
WRONG = """
import pyengine

async def handle(message: pyengine.Message) -> None: ...

async def wrong(producer: pyengine.Producer) -> None:
    (await producer.put_async("orders", b"")).offset  # error
    (await producer.put_many_async("orders", [b""])).msg_id  # error
    producer.put_async("orders", b"").result().offset  # error
    producer.put("orders", "text")  # error
    pyengine.conect("store")  # error
    pyengine.connect("store", refusals="ignore")  # error
    pyengine.connect("store", timeout=1)  # error
    pyengine.consume("store", "orders", auto_comit=False)  # error
    pyengine.consume("store", "orders", commit_interval_s="1s")  # error
    pyengine.run_consumer("store", "orders", "billing", print, concurency=4)  # error
    pyengine.run_consumer("store", "orders", "billing", print, auto_commit=True)  # error
    await pyengine.run_consumer_async("store", "orders", "billing", handle, tag="new")  # error
    pyengine.open_store("store", shm_dir="/tmp")  # error
    pyengine.ConsumerGroups("store", flush_disk_typ="SYNC_FLUSH")  # error
    pyengine.DeadLetters("store", topics=["orders"])  # error
    pyengine.Engine("store", flush_disk_typ="SYNC_FLUSH")  # error
    pyengine.Engine("store", max_index_num=1.5)  # error
    pyengine.Engine("store", share=True)  # error
    pyengine.Topic("orders", int).put(producer, "one")  # error
    pyengine.Topics("store").create("orders", queue=4)  # error
    producer.put_many("orders", [b""], deliver_at="tomorrow")  # error
    pyengine.run_consumer("store", "orders", "billing", print, backoff="1s")  # error
    pyengine.Engine("store").connect(time_out_s=1)  # error
    producer.put_many("orders", ["text"])  # error
    producer.put_many("orders", b"bytes")  # error
    producer.put_many("orders", "text")  # error
    producer.put_async("orders", None)  # error
    producer.put_batch("orders", ["text"])  # error
    pyengine.BatchMessage("text")  # error
    pyengine.Engine("store", flush_disk_type="SYNC")  # error
    pyengine.Engine("store", gateway_tls_mode="on")  # error
    pyengine.Engine("store", gateway_enable="perhaps")  # error
    pyengine.consume("store", "orders", broker_role="MASTER")  # error
    pyengine.consume("store", "orders", level="durable")  # error
    pyengine.consume("store", "orders", sharing="all")  # error
    pyengine.Topics("store").create("orders", perm="rx")  # error
    pyengine.Topic("orders", int, codec="yaml")  # error
    pyengine.Topic("orders", int).put(producer, 1, tag="new")  # error
    pyengine.Topic("orders", int).put_many(producer, [1], unique_key="k")  # error
    pyengine.Topic("orders", int).put_async(producer, 1, once=True)  # error
    pyengine.Topic("orders", int).consume("store").retry([], delay=1)  # error
"""


WANTED = [("wrong.py", number) for number, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# error")]


@pytest.fixture
def program(tmp_path):
    """A folder with right.py, which has no error, and wrong.py, with one in each line that says so."""
    names = [name for name in pyengine.__all__ if name[0].isupper()]
    annotated = ", ".join(f"a_{name}: pyengine.{name}{'[pyengine.PutResult]' if name == 'PutFuture' else ''}" for name in names)
    (tmp_path / "right.py").write_text(RIGHT.replace("{names}", annotated))
    (tmp_path / "wrong.py").write_text(WRONG)
    return tmp_path


@pytest.mark.ci
@pytest.mark.mypy
def test_mypy_checks_a_users_program(program):
    (program / "mypy.ini").write_text("[mypy]\nstrict = True\nfollow_imports = silent\n[mypy-pyengine.*]\nignore_errors = True\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "right.py", "wrong.py"], cwd=program, capture_output=True, text=True,
                          env={"MYPYPATH": str(SOURCES), "PATH": ""}, timeout=scaled_timeout_s(240), check=False)
    found = sorted({(name, int(line)) for name, line in re.findall(r"^(\w+\.py):(\d+): error", done.stdout, re.MULTILINE)})
    assert found == WANTED, done.stdout + done.stderr


@pytest.mark.pyright
def test_pyright_checks_a_users_program(program):
    (program / "pyrightconfig.json").write_text(json.dumps({
        "typeCheckingMode": "standard", "extraPaths": [str(SOURCES)], "include": ["right.py", "wrong.py"]}))
    done = subprocess.run([needs.pyright_command(), "--outputjson", "--pythonpath", sys.executable], cwd=program, capture_output=True,
                          text=True, timeout=scaled_timeout_s(240), check=False)
    found = sorted({(Path(each["file"]).name, each["range"]["start"]["line"] + 1)
                    for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"})
    assert found == WANTED, done.stdout + done.stderr


def test_type_checkers_and_programs_see_the_settings_of_the_table():
    kinds = typing.get_type_hints(pyengine.EngineSettings)
    assert [*kinds] == [*SETTINGS] and pyengine.EngineSettings.__total__ is False
    assert kinds["sync_from"] == typing.Literal["last", "first"] and kinds["spin"] == int | str and kinds["store_host"] is str
    assert kinds["acl_enable"] == bool | typing.Literal["true", "yes", "on", "1", "false", "no", "off", "0"]
    stub = runpy.run_path(str(Path(pyengine.__file__).with_name("_settings.pyi")))
    assert stub["Keywords"].__annotations__ == kinds, "build: CONTRIBUTING.md"


@pytest.mark.parametrize(("options", "call", "not_of_them"), [
    (pyengine.ConnectOptions, pyengine.connect, {"path"}),
    (RetryOptions, pyengine.Consumer.retry, {"self", "message", "delay_level"}),
    (pyengine.ConsumeOptions, pyengine.consume, {"path", "topic", "group", "auto_commit"})])
def test_the_keywords_of_options_are_those_of_the_function(options, call, not_of_them):
    given = {name: each.annotation for name, each in inspect.signature(call).parameters.items() if name not in {*not_of_them, "settings"}}
    of_settings = pyengine.EngineSettings.__annotations__
    own = {name: kind.__forward_arg__ for name, kind in options.__annotations__.items() if name not in of_settings}
    assert own == given, f"{options.__name__} beside {call.__name__}() has its keywords"


@pytest.mark.parametrize(("options", "call"), [
    (PutOptions, pyengine.Producer.put), (PutAsyncOptions, pyengine.Producer.put_async),
    (PutManyOptions, pyengine.Producer.put_many)])
def test_the_keywords_of_a_topic_of_values_are_those_of_the_producer(options, call):
    assert {*options.__annotations__} == {*inspect.signature(call).parameters} - {"self", "topic", "body", "bodies"}


def test_names_of_the_module_are_loaded_when_they_are_used():
    for name in pyengine.__all__:
        assert getattr(pyengine, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        pyengine.conect  # noqa: B018 - the access is what is tested
