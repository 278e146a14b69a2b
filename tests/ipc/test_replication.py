"""The replicator's links as others see them."""

from __future__ import annotations

import pytest

from pyengine.errors import EngineUnavailableError
from pyengine.ipc import shared_objects
from pyengine.ipc.replication import Replication, create_replication
from pyengine.ipc.shared_objects import SharedFolder
from pyengine.native import replication as native


@pytest.fixture
def folder(tmp_path):
    folder = SharedFolder(tmp_path / "pyengine-0123456789abcdef")
    folder.make()
    return folder


def test_links_come_and_go(folder):
    create_replication(folder)
    with Replication(folder, writable=True) as writer, Replication(folder) as reader:
        assert reader.links() == []
        first, second = writer.open_link("127.0.0.1:1111"), writer.open_link("[::1]:2222", native.LINK_CONNECTING)
        first.start(4096)
        first.sent(8192, 4096, 2)
        first.sent(9000, 808, 1)
        first.acked(8192)
        first.state(native.LINK_TRANSFER, "follows")
        links = {link["address"]: link for link in reader.links()}
        link = links["127.0.0.1:1111"]
        assert link | {"since_ms": 0, "acked_ms": 0} == {
            "address": "127.0.0.1:1111", "state": "transfer", "since_ms": 0, "start": 4096, "sent": 9000, "acked": 8192, "acked_ms": 0,
            "bytes": 4904, "frames": 3, "caught_up_ns": 0, "detail": "follows"}
        assert link["since_ms"] > 0 and link["acked_ms"] >= link["since_ms"]
        assert (links["[::1]:2222"]["state"], links["[::1]:2222"]["acked"]) == ("connecting", -1)
        second.close("no answer")
        first.close()
        assert reader.links() == []
        totals = reader.totals()
        assert totals.pop("last_closed").items() >= {"address": "[::1]:2222", "detail": "no answer"}.items()
        assert totals == {"connections": 0, "refused": 0, "closed": 1, "listening_port": None}


def test_a_link_that_is_used_again_knows_nothing_of_the_one_before(folder):
    create_replication(folder)
    with Replication(folder, writable=True) as writer:
        old = writer.open_link("a:1")
        old.start(5)
        old.acked(5)
        old.state(native.LINK_TRANSFER, "follows")
        old.close()
        writer.open_link("b:2")
        (link,) = writer.links()
        assert link.items() >= {"address": "b:2", "state": "ready", "start": -1, "acked": -1, "bytes": 0, "detail": ""}.items()


def test_there_are_no_more_links_than_room(folder):
    create_replication(folder)
    with Replication(folder, writable=True) as writer:
        links = [writer.open_link(str(number)) for number in range(native.LINKS_MAX)]
        assert writer.open_link("one more") is None
        links[7].close()
        assert writer.open_link("one more") is not None
        assert len(writer.links()) == native.LINKS_MAX


def test_the_next_replicator_clears_what_a_dead_one_left(folder):
    create_replication(folder)
    with Replication(folder, writable=True) as dead:
        dead.open_link("a:1").state(native.LINK_TRANSFER, "follows")
        dead.block.links[0].text_seq |= 1  # killed while it wrote
        dead.block.text_seq |= 1
    with Replication(folder) as reader:
        assert reader.links()[0]["address"] == ""  # never a text half written
        with Replication(folder, writable=True) as successor:
            assert reader.links() == []
            successor.open_link("b:2").close("gone")
        assert reader.totals()["last_closed"]["detail"] == "gone"


def test_texts_are_cut_between_characters(folder):
    create_replication(folder)
    with Replication(folder, writable=True) as writer:
        link = writer.open_link("x" * 200)
        link.state(native.LINK_SHUTDOWN, "ä" * 200 + "\0")
        (link,) = writer.links()
        assert link["address"] == "x" * 63
        assert link["detail"] == "ä" * 95


def test_something_else_is_refused(folder):
    with pytest.raises(EngineUnavailableError):
        Replication(folder)
    folder.create(shared_objects.REPLICATION, native.REPLICATION_BYTES).close()
    with pytest.raises(EngineUnavailableError, match="wrong magic"):
        Replication(folder)
