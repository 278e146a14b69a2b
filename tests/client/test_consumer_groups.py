"""Groups of real processes on a running engine: nothing is missed when a member joins, leaves, dies or hangs."""

from __future__ import annotations

import json
import signal
import time
import warnings
from collections import Counter
from contextlib import ExitStack

import pytest

import pyengine
from consuming import Member
from fix_engine import SMALL, RunningEngine
from pyengine.errors import UsageError
from pyengine.storage.consumer_offset import ConsumerOffsets
from waiting import eventually

QUEUES = 4


class Group:
    """Members of one group, and everything that was put for them."""

    def __init__(self, engine: RunningEngine, folder) -> None:
        self.engine = engine
        self.folder = folder
        self.members: list[Member] = []
        self.put: set[tuple[int, int, bytes]] = set()
        self.producer = pyengine.connect(engine.root)

    def join(self, **options) -> Member:
        member = Member(self.engine.root, self.folder / f"member-{len(self.members)}", **options)
        self.members.append(member)
        eventually(lambda: member.is_up, "the member is up", timeout_s=90)
        return member

    def produce(self, count: int) -> None:
        """`count` messages to each queue."""
        for queue_id in range(QUEUES):
            bodies = [b"%d of queue %d" % (len(self.put) + number, queue_id) for number in range(count)]
            result = self.producer.put_many("orders", bodies, queue_id=queue_id)
            assert result.ok
            self.put |= {(queue_id, result.first_queue_offset + number, body) for number, body in enumerate(bodies)}

    def given(self) -> Counter:
        return Counter(one for member in self.members for one in member.seen())

    def wait_all_given(self) -> None:
        """Wait until each message was given to a member, and nothing else was."""
        eventually(lambda: set(self.given()) >= self.put, "every message was given to a member", timeout_s=90)
        assert set(self.given()) == self.put

    def holders(self) -> dict[int, int]:
        (state,) = pyengine.ConsumerGroups(self.engine.root).groups()
        return state.holders

    def wait_shared(self, *members: Member) -> None:
        """Wait until the queues are shared by just these members, in equal parts."""
        pids = {member.process.pid for member in members}
        eventually(lambda: len(self.holders()) == QUEUES and set(self.holders().values()) == pids, "the queues are shared",
                   timeout_s=90)
        shares = Counter(self.holders().values())
        assert max(shares.values()) - min(shares.values()) <= 1

    def close(self) -> None:
        self.producer.close()
        for member in self.members:
            member.sweep()


@pytest.fixture
def group(make_engine, tmp_path):
    engine = make_engine()
    engine.start()
    group = Group(engine, tmp_path)
    yield group
    group.close()


def in_order(member: Member) -> bool:
    """Whether the offsets of each queue only grow."""
    seen: dict[int, int] = {}
    return all(offset > seen.get(queue_id, -1) and seen.update({queue_id: offset}) is None
               for queue_id, offset, _ in member.seen())


def test_members_that_come_and_go_in_order_give_each_message_once(group):
    group.produce(30)
    first = group.join()
    group.wait_all_given()
    second = group.join()
    group.produce(30)
    group.wait_shared(first, second)
    third = group.join()
    group.produce(30)
    group.wait_shared(first, second, third)
    group.produce(30)
    group.wait_all_given()
    assert first.stop() == 0
    group.produce(30)
    group.wait_shared(second, third)
    group.wait_all_given()
    assert set(group.given().values()) == {1}, "an orderly hand-over delivers nothing twice"
    assert all(in_order(member) for member in group.members)


@pytest.mark.ci
def test_no_message_is_missed_when_members_are_killed(group, rng):
    group.produce(20)
    living = [group.join(), group.join()]
    for _ in range(6):
        group.produce(rng.randrange(10, 60))
        victim = living.pop(rng.randrange(len(living)))
        victim.kill()
        living.append(group.join())
        group.produce(rng.randrange(1, 20))
    group.wait_all_given()
    group.wait_shared(*living)
    assert ConsumerOffsets(group.engine.root).table().notes == []


def test_a_stopped_member_loses_its_queues_and_comes_back_as_a_member(group):
    group.produce(20)
    stopped, other = group.join(timeout_s=4), group.join(timeout_s=4)
    group.wait_shared(stopped, other)
    group.wait_all_given()
    stopped.send(signal.SIGSTOP)
    group.produce(20)
    group.wait_all_given()
    assert set(group.holders().values()) == {other.process.pid}
    committed = ConsumerOffsets(group.engine.root).read("orders", "billing")
    stopped.send(signal.SIGCONT)
    group.wait_shared(stopped, other)
    now = ConsumerOffsets(group.engine.root).read("orders", "billing")
    assert all(now[queue_id] >= committed[queue_id] for queue_id in committed), "what it knew counts no more"
    group.produce(20)
    group.wait_all_given()


@pytest.mark.ci
def test_many_members_of_a_group_share_its_queues_with_little_work(group):
    count = 128
    for queue_id in range(count):
        group.producer.put("orders", b"x", queue_id=queue_id)
    began_s = time.process_time()
    with ExitStack() as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first members may not see all queues yet
        members = [opened.enter_context(pyengine.consume(group.engine.root, "orders", group="billing")) for _ in range(count)]
        eventually(lambda: all(len(member.assignment) == 1 for member in members), "each member has a queue", timeout_s=120)
        assert time.process_time() - began_s < 25, "seconds of CPU"


def test_members_outlive_the_engine(group):
    first, second = group.join(), group.join()
    group.produce(20)
    group.wait_all_given()
    group.producer.close()
    group.engine.kill_all()
    group.engine.start()
    group.producer = pyengine.connect(group.engine.root)
    group.produce(20)
    group.wait_all_given()
    group.wait_shared(first, second)
    assert set(group.given().values()) == {1}, "a restart of the engine delivers nothing twice"


def test_a_reset_makes_no_group(builder):
    builder.put("orders", b"x")
    settings = {name: getattr(builder.geometry, name) for name in builder.geometry.__dataclass_fields__}
    with pyengine.consume(builder.root, "orders", group="billing", **settings):
        pass
    groups = pyengine.ConsumerGroups(builder.root, **settings)
    with pytest.raises(UsageError, match="has no offsets of group 'biling' on topic 'orders' [(]did you mean billing[?][)]: a new group"):
        groups.reset("orders", "biling", "first")
    assert [state.group for state in groups.groups()] == ["billing"]


@pytest.mark.parametrize("name", ["a@b", "a/b", ""])
def test_a_brokers_group_with_a_name_that_pyengine_does_not_allow_is_shown(builder, name):
    for _ in range(4):
        builder.put("orders", b"x")
    builder.fill_queue("orders", 0, 3)
    (builder.root / "config").mkdir(exist_ok=True)
    (builder.root / "config/consumerOffset.json").write_text(json.dumps({"offsetTable": {f"orders@{name}": {"0": 1}}}))
    settings = {name: getattr(builder.geometry, name) for name in builder.geometry.__dataclass_fields__}
    (state,) = pyengine.ConsumerGroups(builder.root, **settings).groups()
    assert (state.group, state.lost, state.lag) == (name, 2, 1)


def test_a_reset_in_a_topic_without_queues_is_refused(builder):
    pyengine.consume(builder.root, "planned", group="billing").close()
    with pytest.raises(UsageError, match="has no queues of topic planned"):
        pyengine.ConsumerGroups(builder.root).reset("planned", "billing", "first")


def test_a_reset_reaches_living_members(group):
    first, second = group.join(), group.join()
    group.produce(10)
    group.wait_all_given()
    pyengine.ConsumerGroups(group.engine.root).reset("orders", "billing", "first")
    eventually(lambda: min(group.given()[one] for one in group.put) >= 2, "everything came again", timeout_s=90)
    group.wait_shared(first, second)


def test_a_new_member_of_a_group_with_killed_members_continues_at_the_stored_offsets(group):
    member = group.join()
    group.produce(50)
    group.wait_all_given()
    eventually(lambda: set(ConsumerOffsets(group.engine.root).read("orders", "billing").values()) == {50}, "it is remembered")
    member.kill()
    following = group.join()
    group.produce(5)
    group.wait_all_given()
    assert len(following.seen()) == 5 * QUEUES


@pytest.mark.long
def test_no_message_is_missed_in_a_storm_of_kills_and_stops(group, rng):
    living = [group.join(timeout_s=3) for _ in range(3)]
    for _ in range(40):
        group.produce(rng.randrange(1, 80))
        at = rng.randrange(len(living))
        if rng.random() < 0.5:
            living.pop(at).kill()
            living.append(group.join(timeout_s=3))
        else:
            living[at].send(signal.SIGSTOP)
            group.produce(rng.randrange(1, 40))
            if rng.random() < 0.5:
                group.wait_all_given()  # by the others
            living[at].send(signal.SIGCONT)
    group.wait_all_given()
    group.wait_shared(*living)


def test_notebooks_show_groups_queues_and_messages(make_engine):
    root = make_engine().root
    with pyengine.Engine(root, **SMALL) as engine, engine.connect() as producer, engine.open_store() as store:
        producer.put("<orders>", b"<one>")
        with pyengine.consume(root, "<orders>", group="billing", auto_commit=False) as consumer:
            assert consumer.pull(1, timeout_s=30)
            groups = pyengine.ConsumerGroups(root)
            (state,) = groups.groups()
            assert repr(state) == "GroupState(topic='<orders>', group='billing', lag=1, lost=0, members=1, queues=1)"
            tables = [groups._repr_html_(), store._repr_html_(), store.get_message("<orders>", 0, 0).messages[0]._repr_html_()]
        assert repr(store.get_message("<orders>", 0, 0)) == "GetResult(FOUND, 1 messages, next_begin_offset=1, min_offset=0, max_offset=1)"
    for table, word in zip(tables, ("billing", "&lt;orders&gt;", "&lt;one&gt;"), strict=True):
        assert table.startswith("<table>") and word in table and "<orders>" not in table and "<one>" not in table
    assert store._repr_html_() is None
