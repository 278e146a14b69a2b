"""Offsets of consumer groups: RocketMQ's file, kept right under several writers and damage."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from broker_lock import held_by_a_broker
from dying import run_and_die_at
from fix_cli import environment
from fix_golden import usual
from interrupting import interrupted_at_each_place
from pyengine.errors import DiskError, StoreBusyError, UsageError
from pyengine.formats.small_file import path_stamp
from pyengine.ipc.heartbeat import is_stopped
from pyengine.storage import consumer_offset, durable_file
from pyengine.storage.consumer_offset import ConsumerOffsets
from waiting import eventually, scaled_timeout_s

# As 4.9.8 writes it: integer keys without quotes, tabs.
BY_ROCKETMQ = '{\n\t"offsetTable":{"orders@billing":{0:123,1:45\n\t\t},"%RETRY%billing@billing":{0:7\n\t\t}\n\t}\n}'


@pytest.fixture
def path(tmp_path):
    (tmp_path / "config").mkdir()
    return tmp_path / "config" / "consumerOffset.json"


def test_offsets_that_rocketmq_wrote_are_read_and_kept(tmp_path, path):
    path.write_text(BY_ROCKETMQ)
    offsets = ConsumerOffsets(tmp_path)
    assert offsets.read("orders", "billing") == {0: 123, 1: 45}
    assert offsets.read("orders", "nobody") == {}
    offsets.commit("orders", "billing", {1: 46, 2: 1})
    assert offsets.read("orders", "billing") == {0: 123, 1: 46, 2: 1}
    assert offsets.groups()[("%RETRY%billing", "billing")] == {0: 7}
    assert json.loads(path.read_text())["offsetTable"]["orders@billing"] == {"0": 123, "1": 46, "2": 1}
    assert path.with_name(path.name + ".bak").read_text() == BY_ROCKETMQ


AS_FASTJSON_READS = {
    "a BOM": b'\xef\xbb\xbf{"offsetTable":{"orders@billing":{0:123,1:45}}}',
    "texts and floats": b'{"offsetTable":{"orders@billing":{0:"123",1:45.0}}}',
    "commas before brackets": b'{"offsetTable":{"orders@billing":{0:123,1:45,},\n},}',
    "single quotes": b"{'offsetTable':{'orders@billing':{0:123,'1':45}}}",
    "comments": b'{"offsetTable":{ // by hand\n "orders@billing":{/* first */0:123,1:45, /* last */ }}}',
}


@pytest.mark.parametrize("content", AS_FASTJSON_READS.values(), ids=AS_FASTJSON_READS.keys())
def test_an_edited_file_that_rocketmq_reads_is_read(tmp_path, path, content):
    path.write_bytes(content)
    offsets = ConsumerOffsets(tmp_path)
    assert offsets.read("orders", "billing") == {0: 123, 1: 45} and offsets.notes() == []


@pytest.mark.parametrize("offset", [b'"1_0"', b'"x"', b"2.5", b"NaN", b"true", b"null", b"[]"])
def test_what_is_no_number_is_no_offset(tmp_path, path, offset):
    path.write_bytes(b'{"offsetTable":{"orders@billing":{0:' + offset + b"}}}")
    assert any("it is not an offset table" in note for note in ConsumerOffsets(tmp_path).notes())


def test_the_stamp_of_an_update_is_of_its_own_table(tmp_path):
    offsets = ConsumerOffsets(tmp_path)
    offsets.commit("orders", "billing", {0: 7})
    for committed in (8, 8):  # changed, unchanged
        found = offsets.update(lambda table: table["orders@billing"].update({0: committed}))
        assert found.offsets == {"orders@billing": {0: committed}} and found.stamp == path_stamp(offsets.path)
    ConsumerOffsets(tmp_path).commit("orders", "billing", {0: 9})
    assert found.stamp != path_stamp(offsets.path)


HOSTILE = {
    "empty": b"",
    "cut": b"{",
    "zeroes": bytes(4096),
    "a number": b'{"offsetTable":3}',
    "a list": b"[]",
    "null": b"null",
    "no table": b'{"other":{}}',
    "a table of lists": b'{"offsetTable":{"orders@billing":[1]}}',
    "an offset as text": b'{"offsetTable":{"orders@billing":{"0":"seven"}}}',
    "a fraction": b'{"offsetTable":{"orders@billing":{"0":7.5}}}',
    "true": b'{"offsetTable":{"orders@billing":{"0":true}}}',
    "a huge offset": b'{"offsetTable":{"orders@billing":{"0":%s}}}' % (b"9" * 30),
    "digits without end": b'{"offsetTable":{"orders@billing":{"0":%s}}}' % (b"9" * 10_000),
    "a huge queue": b'{"offsetTable":{"orders@billing":{"99999999999":1}}}',
    "a negative queue": b'{"offsetTable":{"orders@billing":{-1:1}}}',
    "half a surrogate": b'{"offsetTable":{"\\ud800@g":{"0":1}}}',
    "nested without end": b'{"offsetTable":' + b"[" * 200_000,
    "no UTF-8": b'{"offsetTable":{"\xff@g":{}}}',
    "another checksum": b'{"offsetTable":{"orders@billing":{"0":7}}}\n' + b" " * 32 + b"\n",
}


@pytest.mark.parametrize("damage", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_damaged_file_falls_back_to_the_one_before_and_says_so(tmp_path, path, damage):
    offsets = ConsumerOffsets(tmp_path)
    offsets.commit("orders", "billing", {0: 1})
    offsets.commit("orders", "billing", {0: 2})
    path.write_bytes(damage)
    assert offsets.read("orders", "billing") == {0: 1}
    first, second = offsets.table().notes
    assert "consumerOffset.json" in first and "consumerOffset.json.bak is used" in second
    offsets.commit("orders", "billing", {1: 5})
    assert offsets.table().notes == [] and offsets.read("orders", "billing") == {0: 1, 1: 5}
    assert path.with_name(path.name + ".damaged").read_bytes() == damage
    assert ConsumerOffsets(tmp_path).table().offsets == {"orders@billing": {0: 1, 1: 5}}


def test_no_single_bit_and_no_cut_makes_it_say_something_else(tmp_path, path):
    offsets = ConsumerOffsets(tmp_path)
    offsets.commit("orders", "billing", {0: 100})
    offsets.commit("orders", "billing", {0: 123})
    good = path.read_bytes()
    wrong = []
    for bit in range(len(good) * 8):
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        if offsets.read("orders", "billing") not in ({0: 100}, {0: 123}):
            wrong.append(f"bit {bit}")
    for size in range(len(good)):
        path.write_bytes(good[:size])
        if offsets.read("orders", "billing") not in ({0: 100}, {0: 123}):
            wrong.append(f"cut at {size}")
    assert wrong == []


def test_a_damaged_file_never_becomes_the_backup(tmp_path, path):
    """Killed at any system call of the commit that follows the damage, the good offsets are still found."""
    offsets = ConsumerOffsets(tmp_path)
    for step in range(200):
        path.unlink(missing_ok=True)
        offsets.commit("orders", "billing", {0: 1})
        offsets.commit("orders", "billing", {0: 2})
        path.write_bytes(b"\0" * 100)
        ended = run_and_die_at(step, lambda: ConsumerOffsets(tmp_path).commit("orders", "billing", {1: 1}), SYSTEM_CALLS)
        assert ConsumerOffsets(tmp_path).read("orders", "billing") in ({0: 1}, {0: 1, 1: 1}), step
        if ended:
            assert step > 8
            return
    pytest.fail("the commit never came to its end")


SYSTEM_CALLS = ("open", "write", "pwrite", "fsync", "link", "rename", "unlink", "close")


def test_killed_at_any_system_call_a_commit_is_made_or_not(tmp_path, path):
    offsets = ConsumerOffsets(tmp_path)
    offsets.commit("orders", "billing", {0: 1})
    for step in range(200):
        before = offsets.read("orders", "billing")[0]
        ended = run_and_die_at(
            step, lambda value=before + 1: ConsumerOffsets(tmp_path).commit("orders", "billing", {0: value}), SYSTEM_CALLS)
        assert offsets.read("orders", "billing")[0] in (before, before + 1), step
        assert offsets.table().notes == []
        if ended:
            assert offsets.read("orders", "billing")[0] == before + 1 and step > 8
            assert sorted(one.name for one in path.parent.iterdir()) == [
                "consumerOffset.json", "consumerOffset.json.bak", "consumerOffset.json.lock"], "nothing unfinished is left"
            return
    pytest.fail("the commit never came to its end")


def test_damaged_offset_files_give_no_offsets_and_are_noted(tmp_path, path):
    path.write_bytes(b"{")
    path.with_name(path.name + ".bak").write_bytes(b"[")
    found = ConsumerOffsets(tmp_path).table()
    assert found.offsets == {} and len(found.notes) == 3


def test_a_store_without_the_file_has_no_offsets(tmp_path):
    assert ConsumerOffsets(tmp_path).read("orders", "billing") == {}


def test_no_commit_of_another_is_lost(tmp_path):
    def commit(queue_id: int) -> None:
        for offset in range(1, 11):
            ConsumerOffsets(tmp_path).commit("orders", "billing", {queue_id: offset})

    threads = [threading.Thread(target=commit, args=(queue_id,)) for queue_id in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ConsumerOffsets(tmp_path).read("orders", "billing") == dict.fromkeys(range(4), 10)


# Stops itself, by SIGSTOP, at the system call named, in the middle of its commit.
STOPS = """
import os, signal, sys
from pyengine.storage.consumer_offset import ConsumerOffsets
offsets, where = ConsumerOffsets(sys.argv[1]), sys.argv[2]
def change(table):
    table["orders@billing"][0] = 2
    real = getattr(os, where)
    def stop_once(*arguments, **named):
        setattr(os, where, real)
        os.kill(os.getpid(), signal.SIGSTOP)
        return real(*arguments, **named)
    setattr(os, where, stop_once)
offsets.update(change)
"""


@pytest.mark.parametrize("where", usual(["open", "pwrite", "fsync", "link", "rename", "unlink"], ["pwrite", "rename"], pytest.mark.ci))
@pytest.mark.parametrize("ends", [signal.SIGCONT, signal.SIGKILL], ids=["resumes", "dies"])
def test_while_a_writer_is_stopped_commits_are_refused_and_none_is_lost(tmp_path, monkeypatch, where, ends):
    offsets = ConsumerOffsets(tmp_path)
    offsets.commit("orders", "billing", {0: 1})
    stopped = subprocess.Popen([sys.executable, "-c", STOPS, str(tmp_path), where], env=environment())
    try:
        eventually(lambda: is_stopped(stopped.pid), "the writer has stopped itself")
        with monkeypatch.context() as patch:
            patch.setattr(durable_file, "LOCK_WAIT_S", 0.05)
            with pytest.raises(StoreBusyError, match="another process has held .*consumerOffset.json.lock"):
                offsets.commit("orders", "audit", {0: 5})
        assert offsets.read("orders", "billing")[0] in (1, 2)
        os.kill(stopped.pid, ends)
        stopped.wait(scaled_timeout_s(60))
    finally:
        stopped.kill()
        stopped.wait()
    before = offsets.read("orders", "billing")
    offsets.commit("orders", "audit", {0: 5})
    assert offsets.read("orders", "billing") == before and before[0] in ((2,) if ends == signal.SIGCONT else (1, 2))
    assert offsets.read("orders", "audit") == {0: 5} and offsets.table().notes == []


def test_only_what_another_program_has_written_is_decoded(tmp_path, path, monkeypatch):
    offsets, decode, decoded = ConsumerOffsets(tmp_path), consumer_offset.decode_offsets, []
    monkeypatch.setattr(consumer_offset, "decode_offsets", lambda content: decoded.append(content) or decode(content))
    offsets.commit("orders", "billing", {1: 1, 0: 1})
    offsets.commit("orders", "audit", {0: 5})
    assert [*offsets.groups().items()] == [(("orders", "audit"), {0: 5}), (("orders", "billing"), {0: 1, 1: 1})] and not decoded
    before = path.stat()
    path.write_bytes(BY_ROCKETMQ.encode().ljust(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # two writes within one step of the clock
    assert offsets.read("orders", "billing") == {0: 123, 1: 45} and len(decoded) == 1
    path.write_text("{")
    assert offsets.table().is_damaged and offsets.read("orders", "audit") == {}, "those of the file before"


def test_a_table_belongs_to_its_caller(tmp_path):
    offsets = ConsumerOffsets(tmp_path)
    for table in (offsets.update(lambda table: table.update({"orders@billing": {0: 1}})), offsets.table(), offsets.table()):
        assert table.offsets == {"orders@billing": {0: 1}}
        table.offsets["orders@billing"][0] = 9
    with pytest.raises(KeyError):
        offsets.update(lambda table: table["orders@billing"].pop(0) and table.pop("no group"))
    assert offsets.read("orders", "billing") == {0: 1}


def test_a_commit_waits_as_long_as_others_commit(tmp_path, monkeypatch):
    offsets, lock, others = ConsumerOffsets(tmp_path), durable_file.try_lock, iter(range(40))
    offsets.commit("orders", "billing", {0: 1})
    monkeypatch.setattr(durable_file, "LOCK_WAIT_S", 0.02)

    def of_others(*given):
        for number in others:
            os.utime(offsets.path, ns=(0, number))
            return False
        return lock(*given)

    monkeypatch.setattr(durable_file, "try_lock", of_others)
    offsets.commit("orders", "audit", {0: 5})
    assert not list(others) and offsets.read("orders", "audit") == {0: 5}


def test_a_commit_waits_as_long_as_the_lock_changes_hands(tmp_path, monkeypatch):
    offsets, lock, others = ConsumerOffsets(tmp_path), durable_file.try_lock, iter(range(40))
    offsets.commit("orders", "billing", {0: 1})
    monkeypatch.setattr(durable_file, "LOCK_WAIT_S", 0.02)

    def of_others(*given):
        for _ in others:
            with monkeypatch.context() as patch:
                patch.setattr(durable_file, "try_lock", lock)
                ConsumerOffsets(tmp_path).update(lambda table: None)  # a member that claims a queue writes no offset
            return False
        return lock(*given)

    monkeypatch.setattr(durable_file, "try_lock", of_others)
    offsets.commit("orders", "audit", {0: 5})
    assert not list(others) and offsets.read("orders", "audit") == {0: 5}


def test_a_pause_of_this_process_is_no_wait_for_the_lock(tmp_path, monkeypatch):
    offsets = ConsumerOffsets(tmp_path)
    offsets.commit("orders", "billing", {0: 1})
    stopped = subprocess.Popen([sys.executable, "-c", STOPS, str(tmp_path), "rename"], env=environment())
    clock, looks = time.monotonic, []

    def resumed_together():
        looks.append(0)
        if len(looks) == 4:
            os.kill(stopped.pid, signal.SIGCONT)
        return clock() + (0 if len(looks) < 4 else 60)

    try:
        eventually(lambda: is_stopped(stopped.pid), "the writer has stopped itself")
        monkeypatch.setattr(durable_file, "time", SimpleNamespace(monotonic=resumed_together, sleep=time.sleep))
        offsets.commit("orders", "audit", {0: 5})
        assert stopped.wait(scaled_timeout_s(60)) == 0
    finally:
        stopped.kill()
        stopped.wait()
    assert offsets.groups() == {("orders", "billing"): {0: 2}, ("orders", "audit"): {0: 5}}


def test_a_child_forked_during_a_commit_does_not_keep_the_lock(tmp_path, monkeypatch):
    offsets, children = ConsumerOffsets(tmp_path), []

    def fork(_):
        children.append(os.fork())
        if children[0] == 0:
            signal.pause()

    offsets.update(fork)
    try:
        monkeypatch.setattr(durable_file, "LOCK_WAIT_S", 0)
        ConsumerOffsets(tmp_path).commit("orders", "billing", {0: 1})
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_a_child_does_not_keep_the_lock_of_a_parent_that_is_killed_in_a_commit(tmp_path, monkeypatch):
    code = """
import os, signal, sys, threading
from pyengine.storage.consumer_offset import ConsumerOffsets
inside = threading.Event()
def change(table):
    inside.set()
    threading.Event().wait()
threading.Thread(target=ConsumerOffsets(sys.argv[1]).update, args=(change,), daemon=True).start()
inside.wait()
child = os.fork()
if child == 0:
    os.write(1, b"%d\\n" % os.getpid())
    signal.pause()
threading.Event().wait()
"""
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], env=environment(), stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        try:
            monkeypatch.setattr(durable_file, "LOCK_WAIT_S", 0)
            ConsumerOffsets(tmp_path).commit("orders", "billing", {0: 1})
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer it goes no further
def test_an_update_that_a_signal_handler_interrupts_keeps_no_other_from_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(durable_file, "LOCK_WAIT_S", 0)
    for _ in interrupted_at_each_place(lambda: ConsumerOffsets(tmp_path).update(bool)):
        ConsumerOffsets(tmp_path).update(bool)


def test_a_commit_is_refused_while_another_program_owns_the_store(tmp_path, path):
    path.write_text(BY_ROCKETMQ)
    (tmp_path / "lock").write_text("lock")
    with held_by_a_broker(tmp_path):
        with pytest.raises(StoreBusyError):
            ConsumerOffsets(tmp_path).commit("orders", "billing", {0: 124})
        assert path.read_text() == BY_ROCKETMQ
    ConsumerOffsets(tmp_path).commit("orders", "billing", {0: 124})


@pytest.mark.parametrize(("topic", "group"), [("", "g"), ("t", ""), ("a@b", "g"), ("t", "g@h"), ("t", "g/h"), ("t", "g\n"),
                                             ("t", "g" * 128)])
def test_names_that_the_file_cannot_carry_are_refused(tmp_path, topic, group):
    with pytest.raises(UsageError):
        ConsumerOffsets(tmp_path).commit(topic, group, {0: 1})


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_a_file_that_the_system_does_not_let_be_read_is_no_damage(tmp_path, path, monkeypatch, number):
    path.write_text(BY_ROCKETMQ)
    offsets = ConsumerOffsets(tmp_path)

    def fails(name):
        raise OSError(number, "refused", str(name))

    with monkeypatch.context() as patch:
        patch.setattr("pyengine.storage.consumer_offset.read_small_file", fails)
        with pytest.raises(DiskError, match=f"cannot read {path}: refused"):
            offsets.read("orders", "billing")
        with pytest.raises(DiskError):
            offsets.commit("orders", "billing", {1: 46})
        (note,) = offsets.lower({})
        assert "could not be read" in note
    assert path.read_text() == BY_ROCKETMQ and offsets.read("orders", "billing") == {0: 123, 1: 45}


def test_a_table_that_could_not_be_read_again_is_not_written(tmp_path, path, monkeypatch):
    offsets = ConsumerOffsets(tmp_path)
    offsets.commit("T", "G", {0: 1})
    monkeypatch.setattr("pyengine.storage.consumer_offset.SMALL_FILE_BYTES_MAX", 200)
    with pytest.raises(DiskError, match="more than 200, which is all that is read"):
        offsets.commit("T", "G", dict.fromkeys(range(100), 1))
    assert offsets.read("T", "G") == {0: 1}
