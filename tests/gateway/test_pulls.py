"""Pulls: what a client gets, what it is told where there is nothing, and pulls that are held."""

from __future__ import annotations

import asyncio
import errno
import itertools
import threading
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

import pyengine
from fix_engine import SMALL
from fix_gateway import heartbeat, pull_fields, send_fields, subscription
from pyengine.errors import StoreBusyError
from pyengine.formats.record import decode_record
from pyengine.gateway import codes, members
from pyengine.gateway.connections import FAR_READS_MAX, Connection, Connections, Limits, Request, RequestRefusedError, TurnExecutor
from pyengine.gateway.members import subscription_of
from pyengine.gateway.pulls import Pull, Pulls
from pyengine.gateway.wire import Frame
from pyengine.results import GetRecords, GetResult, GetStatus
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups, TopicConfig, TopicConfigs
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile
from waiting import eventually

OF_MASTER = SimpleNamespace(is_of_slave=False, suggests_slaves=False)  # what a pull asks of Names


def put(client, topic, *bodies, queue_id=1, properties=""):
    for body in bodies:
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic, queue_id, properties), body).code == codes.SUCCESS


def bodies_of(answer):
    found, at = [], 0
    while at < len(answer.body):
        message = decode_record(answer.body, at)
        found.append(message.body)
        at += message.size_bytes
    return found


def wait_for(served, topic, count, queue_id=1):
    with pyengine.open_store(served.root) as store:
        assert store.wait_for_message(topic, queue_id, count - 1, timeout_s=30, level="committed")


def test_a_pull_gives_the_records_as_they_are_in_the_log(served, topic):
    client = served.broker()
    put(client, topic, b"a", b"b", b"c", properties="KEYS\x01k")
    wait_for(served, topic, 3)
    answer = client.ask(codes.PULL_MESSAGE, pull_fields(topic, 1, 1, maxMsgNums=8))
    assert (answer.code, answer.remark) == (codes.SUCCESS, "FOUND") and bodies_of(answer) == [b"b", b"c"]
    assert answer.fields == {"nextBeginOffset": "3", "minOffset": "0", "maxOffset": "3", "suggestWhichBrokerId": "0"}
    first = decode_record(answer.body, 0)
    segment_bytes = SMALL["mapped_file_size_commit_log_bytes"]
    at = first.physical_offset % segment_bytes
    with open(served.root / "commitlog" / f"{first.physical_offset - at:020d}", "rb") as log:
        log.seek(at)
        assert log.read(first.size_bytes) == answer.body[:first.size_bytes]


def test_a_lite_pull_of_a_later_client_is_served_as_a_pull(served, topic):
    client = served.broker()
    put(client, topic, b"a", b"b")
    wait_for(served, topic, 2)
    fields = pull_fields(topic, 0, 1, sysFlag=22)  # as DefaultLitePullConsumer sends it: of its own subscription, held, lite
    asked = [client.ask(code, fields) for code in (codes.PULL_MESSAGE, codes.LITE_PULL_MESSAGE)]
    assert (asked[0].code, asked[0].fields, asked[0].body) == (asked[1].code, asked[1].fields, asked[1].body)
    held = client.send(codes.LITE_PULL_MESSAGE, pull_fields(topic, 2, 1, sysFlag=22))
    put(client, topic, b"c")
    assert bodies_of(client.wait(held)) == [b"c"]


STATUSES = {
    "end": (1, 1, codes.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", 1),
    "beyond": (1, 500, codes.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY", 1),
    "negative": (1, -1, codes.PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL", 0),
    "empty queue": (3, 0, codes.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE", 0),
    "empty queue, other offset": (3, 7, codes.PULL_OFFSET_MOVED, "NO_MESSAGE_IN_QUEUE", 0),
}


@pytest.mark.parametrize("queue_id, offset, code, status, following", STATUSES.values(), ids=[name.replace(" ", "-") for name in STATUSES])
def test_each_status_has_its_code_and_tells_where_to_go_on(served, topic, queue_id, offset, code, status, following):
    client = served.broker()
    put(client, topic, b"a")
    wait_for(served, topic, 1)
    answer = client.ask(codes.PULL_MESSAGE, pull_fields(topic, offset, queue_id))
    assert (answer.code, answer.remark, answer.fields["nextBeginOffset"], answer.body) == (code, status, str(following), b"")


def test_tags_and_conditions_choose_messages(served, topic):
    client = served.broker()
    put(client, topic, b"red", properties="TAGS\x01red\x02price\x013")
    put(client, topic, b"blue", properties="TAGS\x01blue\x02price\x017")
    put(client, topic, b"none")
    wait_for(served, topic, 3)
    assert bodies_of(client.ask(codes.PULL_MESSAGE, pull_fields(topic, 0, 1, subscription="red || none"))) == [b"red"]
    condition = pull_fields(topic, 0, 1, subscription="price > 5", expressionType="SQL92")
    assert bodies_of(client.ask(codes.PULL_MESSAGE, condition)) == [b"blue"]
    followed = condition | {"subscription": "price > 5 )"}  # RocketMQ ignores what follows a whole condition
    assert bodies_of(client.ask(codes.PULL_MESSAGE, followed)) == [b"blue"]
    answer = client.ask(codes.PULL_MESSAGE, pull_fields(topic, 0, 1, subscription="green"))
    assert (answer.code, answer.remark, answer.fields["nextBeginOffset"]) == (codes.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE", "3")
    assert client.ask(codes.PULL_MESSAGE, pull_fields(topic, subscription=" || ")).code == codes.SUBSCRIPTION_PARSE_FAILED
    bad = pull_fields(topic, subscription="price >", expressionType="SQL92")
    assert client.ask(codes.PULL_MESSAGE, bad).code == codes.SUBSCRIPTION_PARSE_FAILED


@pytest.mark.parametrize("tag", ["red\u3000", "red\u00a0", "\u2003red", "red\x85", "my red", "red=(1)"])
def test_a_subscription_to_a_tag_that_rocketmq_can_send_gets_its_messages_alone(served, topic, tag):
    client = served.broker()
    put(client, topic, b"other", properties="TAGS\x01red")
    put(client, topic, b"wanted", properties=f"TAGS\x01{tag}")
    wait_for(served, topic, 2)
    assert bodies_of(client.ask(codes.PULL_MESSAGE, pull_fields(topic, 0, 1, subscription=f" {tag}\x1c|| ||"))) == [b"wanted"]


def test_a_pull_without_a_subscription_goes_by_its_groups_heartbeat(served, topic):
    client = served.broker()
    put(client, topic, b"a", properties="TAGS\x01a")
    put(client, topic, b"b", properties="TAGS\x01b")
    wait_for(served, topic, 2)
    fields = pull_fields(topic, 0, 1, "beaters", sysFlag=0)
    answer = client.ask(codes.PULL_MESSAGE, fields)
    assert answer.code == codes.SUBSCRIPTION_NOT_EXIST and "group info not exist" in answer.remark
    heartbeat(client, "me", "beaters", subscription("another"))
    answer = client.ask(codes.PULL_MESSAGE, fields)
    assert answer.code == codes.SUBSCRIPTION_NOT_EXIST and "subscription not exist" in answer.remark
    heartbeat(client, "me", "beaters", subscription(topic, "b", 5))
    assert bodies_of(client.ask(codes.PULL_MESSAGE, fields)) == [b"b"]
    answer = client.ask(codes.PULL_MESSAGE, fields | {"subVersion": 6})
    assert (answer.code, answer.remark) == (codes.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")


def test_a_pull_with_a_wrong_topic_queue_permission_or_group_is_refused(served, topic):
    ask = served.broker().ask
    assert ask(codes.PULL_MESSAGE, pull_fields("gone")).code == codes.TOPIC_NOT_EXIST
    answer = ask(codes.PULL_MESSAGE, pull_fields(topic, queue_id=77))
    assert answer.code == codes.SYSTEM_ERROR and f"queueId[77] is illegal, topic:[{topic}]" in answer.remark
    from pyengine.storage.config_table import TopicConfigs

    TopicConfigs(served.root).update(topic, perm=2)
    assert ask(codes.PULL_MESSAGE, pull_fields(topic)).code == codes.NO_PERMISSION
    assert ask(codes.PULL_MESSAGE, pull_fields(topic, group="a/b")).code == codes.SYSTEM_ERROR


def test_a_held_pull_ends_with_the_message_that_comes(served, topic):
    client = served.broker()
    held = client.send(codes.PULL_MESSAGE, pull_fields(topic, 0, 2, sysFlag=6))
    other = client.send(codes.PULL_MESSAGE, pull_fields(topic, 0, 3, sysFlag=6, suspendTimeoutMillis=400))
    assert client.ask(codes.GET_MAX_OFFSET, {"topic": topic, "queueId": 2}).fields["offset"] == "0", "others are served meanwhile"
    put(served.broker(), topic, b"now", queue_id=2)
    assert bodies_of(client.wait(held)) == [b"now"]
    answer = client.wait(other)
    assert (answer.code, answer.remark) == (codes.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE")


def test_a_held_pull_skips_messages_with_other_tags(served, topic):
    client, putter = served.broker(), served.broker()
    held = client.send(codes.PULL_MESSAGE, pull_fields(topic, 0, 2, sysFlag=6, subscription="wanted"))
    put(putter, topic, b"no", b"no", queue_id=2, properties="TAGS\x01other")
    put(putter, topic, b"yes", queue_id=2, properties="TAGS\x01wanted")
    assert bodies_of(client.wait(held)) == [b"yes"]
    short = client.send(codes.PULL_MESSAGE, pull_fields(topic, 3, 2, sysFlag=6, subscription="wanted", suspendTimeoutMillis=700))
    put(putter, topic, b"no", queue_id=2, properties="TAGS\x01other")
    answer = client.wait(short)
    assert (answer.code, answer.fields["nextBeginOffset"]) == (codes.PULL_RETRY_IMMEDIATELY, "4")


def begin_held(client, fields):
    held = client.send(codes.PULL_MESSAGE, fields)
    assert client.ask(codes.GET_MAX_OFFSET, fields).code == codes.SUCCESS and not client.is_answered(held)
    return held


def test_a_held_pull_gets_no_message_once_its_group_or_topic_may_not_be_read(served, topic):
    client, sender = served.broker(), served.broker()
    groups, topics = SubscriptionGroups(served.root), TopicConfigs(served.root)
    group = SubscriptionGroup(f"{topic}-held")
    heartbeat(client, "me", group.group, subscription(topic))
    fields = pull_fields(topic, 0, 2, group.group, sysFlag=2)
    known = topics.read().rows[topic]
    for forbid, allow, words in (
            (lambda: groups.put(replace(group, consume_enable=False)), lambda: groups.put(group), "subscription group no permission"),
            (lambda: topics.update(topic, perm=2), lambda: topics.update(topic, perm=known.perm), "pulling message is forbidden")):
        allowed = begin_held(client, fields)
        forbid()
        assert sender.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 2), b"too late").code == codes.SUCCESS
        answer = client.wait(allowed)
        assert answer.code == codes.NO_PERMISSION and words in answer.remark and not answer.body
        allow()
        fields["queueOffset"] += 1
    held = begin_held(client, fields)
    assert sender.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 2), b"in time").code == codes.SUCCESS
    assert bodies_of(client.wait(held)) == [b"in time"]


def test_a_held_pull_skips_nothing_by_a_subscription_that_its_group_has_changed(served, topic):
    """Its client would filter by the old one too."""
    client, sender = served.broker(), served.broker()
    group = f"{topic}-changes"
    heartbeat(client, "me", group, subscription(topic, "old", 1))
    fields = pull_fields(topic, 0, 2, group, sysFlag=2, subVersion=1)
    held = begin_held(client, fields)
    heartbeat(client, "me", group, subscription(topic, "new", 2))
    for tag in ("new", "old"):
        assert sender.ask(codes.SEND_MESSAGE_V2, send_fields(topic, 2, f"TAGS\x01{tag}"), tag.encode()).code == codes.SUCCESS
    answer = client.wait(held)
    assert (answer.code, answer.fields["nextBeginOffset"], answer.body) == (codes.PULL_RETRY_IMMEDIATELY, "0", b"")
    assert bodies_of(client.ask(codes.PULL_MESSAGE, fields | {"subVersion": 2})) == [b"new"]


def test_a_held_pull_ends_with_its_connection(served, topic):
    before = served.engine.pid("gateway")
    for _ in range(20):
        client = served.broker()
        client.send(codes.PULL_MESSAGE, pull_fields(topic, 0, 3, sysFlag=6, suspendTimeoutMillis=100_000))
        client.close()
    put(served.broker(), topic, b"x", queue_id=3)
    wait_for(served, topic, 1, 3)
    assert bodies_of(served.broker().ask(codes.PULL_MESSAGE, pull_fields(topic, 0, 3))) == [b"x"]
    assert served.engine.pid("gateway") == before


def test_an_offset_comes_with_a_pull(served, topic):
    client = served.broker()
    put(client, topic, b"a", b"b")
    client.ask(codes.PULL_MESSAGE, pull_fields(topic, 0, 1, "committers", sysFlag=5, commitOffset=2))
    found = eventually(lambda: client.ask(codes.QUERY_CONSUMER_OFFSET, {"consumerGroup": "committers", "topic": topic, "queueId": 1}),
                       "the offset is known")
    assert found.fields == {"offset": "2"}


class FailingReader:
    """A store with one message in each queue that cannot be read: each topic fails with the exception that it names."""

    def __init__(self) -> None:
        self.has_messages = False
        self.fails = {"queue": OSError(errno.EMFILE, "Too many open files"), "read": RecursionError("too deep"),
                      "busy": StoreBusyError("it is being recovered")}

    def _look(self, *_):
        return None

    def _arrivals(self):
        raise StoreBusyError("it is being recovered")

    def _wait_for_arrival(self, timeout_s, seen):
        raise OSError(errno.EMFILE, "Too many open files")

    def dispatched_offset(self, level):
        return 1

    def _queue(self, topic, queue_id):
        if self.has_messages and topic == "queue":
            raise self.fails[topic]
        return SimpleNamespace(max_offset=lambda limit: int(self.has_messages))

    def _get_records(self, topic, *_):
        if topic in self.fails:
            raise self.fails[topic]
        return GetRecords(GetStatus.FOUND, next_begin_offset=1)


def hold(pulls: Pulls, pull: Pull, left_ms: float = 100_000.0) -> None:
    """Let a pull wait that finds nothing."""
    pulls._hold(pull, left_ms)


class Asked(Request):
    """A pull's request at a connection without a socket."""

    def __init__(self, answers, report=lambda host, text: None) -> None:
        connection = Connection(Connections(Limits(), report), {})
        connection.is_closed = False
        super().__init__(connection, Frame(codes.PULL_MESSAGE, {}, b"", 1), 0)
        self.answers = answers

    def reply(self, answer):
        self._is_open = False
        self.answers.append(answer)


def test_a_failure_at_one_topic_ends_only_the_held_pulls_of_that_topic():
    reader, said = FailingReader(), []
    answers = {topic: [] for topic in ("queue", "read", "busy", "good")}

    async def whole():
        pulls = Pulls(reader, OF_MASTER, None, None, None)
        pulls.arrivals.start()
        try:
            for topic, found in answers.items():
                for _ in range(2):
                    asked = Asked(found, lambda host, text: said.append(text))
                    hold(pulls, Pull(asked, topic, 1, 0, 32, subscription_of(topic, "*", 0, None), 0))
            assert pulls.held == 8 and not any(answers.values())
            reader.has_messages = True
            async with asyncio.timeout(60):
                while pulls.held:
                    await asyncio.sleep(0.01)
        finally:
            await asyncio.get_running_loop().run_in_executor(None, pulls.arrivals.close)

    asyncio.run(whole())
    assert {topic: [answer.code for answer in found] for topic, found in answers.items()} == {
        "queue": [codes.SYSTEM_ERROR] * 2, "read": [codes.SYSTEM_ERROR] * 2, "busy": [codes.SYSTEM_ERROR] * 2,
        "good": [codes.SUCCESS] * 2}
    assert answers["busy"][0].remark == "StoreBusyError: it is being recovered"
    assert sorted({text.partition("(")[0] for text in said}) == ["request 11 failed: OSError", "request 11 failed: RecursionError"]


@pytest.mark.parametrize("confirmed", [0, 1])
def test_a_pull_at_an_offset_that_slaves_have_not_confirmed_is_not_moved(builder, confirmed):
    ends = [0, *(message.physical_offset + message.size_bytes for message in (builder.put("T", b"x") for _ in range(3)))]
    ReplicationStateFile(builder.root).write(ReplicationState("SYNC_MASTER", ends[confirmed], "replicated"))
    with pyengine.open_store(builder.root, **asdict(builder.geometry)) as reader:
        pulls = Pulls(reader, OF_MASTER, None, None, None)

        def asked(offset):
            pull = Pull(Asked([]), "T", 0, offset, 32, subscription_of("T", "*", 0, None), offset)
            answer = pulls._answer_or_hold(pull, 0, pulls._near(pull))
            return answer.code, int(answer.fields["nextBeginOffset"])

        assert asked(3) == (codes.PULL_NOT_FOUND, 3) and asked(2) == (codes.PULL_NOT_FOUND, 2)
        assert asked(4) == (codes.PULL_OFFSET_MOVED, confirmed)


def test_a_pull_with_a_condition_is_parsed_and_read_in_another_thread(monkeypatch):
    """A text of 64 KB takes a tenth of a second, at each message if more of them are held than are remembered."""
    answers, threads, statuses = [], set(), [GetStatus.NO_MATCHED_MESSAGE, GetStatus.FOUND]
    parse = members.parse_condition
    monkeypatch.setattr(members, "parse_condition", lambda *text, **rest: threads.add(threading.current_thread()) or parse(*text, **rest))

    class Reader(FailingReader):
        def _fetch(self, *_):
            threads.add(threading.current_thread())
            return GetResult(statuses.pop(0), next_begin_offset=0)

    async def whole(executor):
        reader = Reader()
        names = SimpleNamespace(is_of_slave=False, suggests_slaves=False, group=SubscriptionGroup,
                                existing=lambda name, advice: TopicConfig(name))
        pulls = Pulls(reader, names, None, None, executor)
        reader.has_messages = True
        asked = [Asked(answers), Asked([])]
        for request in asked:
            hold(pulls, Pull(request, "T", 1, 0, 32, subscription_of("T", "a > 1", 0, "SQL92"), 0))
            if request is asked[0]:
                async with asyncio.timeout(60):
                    while pulls.held:
                        await asyncio.sleep(0.001)
                        await pulls.arrivals.check()
                statuses.append(GetStatus.FOUND)
            else:
                await asyncio.sleep(0)  # the read begins
                request.connection.is_closed = True
                await pulls.arrivals.check()
        while pulls._tasks:
            await asyncio.sleep(0.001)
        assert pulls.held == 0
        statuses.append(GetStatus.FOUND)
        asked[0].frame.fields.update({name: str(text) for name, text in pull_fields(
            "T", subscription="a > 1", expressionType="SQL92").items()})
        answers.append(await pulls.pull(asked[0]))

    with TurnExecutor(2, "test") as executor:
        asyncio.run(whole(executor))
    assert [answer.code for answer in answers] == [codes.SUCCESS] * 2 and not statuses
    assert threading.current_thread() not in threads


def test_pulls_that_threads_read_for_wait_until_their_client_reads():
    """Otherwise their messages wait beside each other, uncounted, or a slow client loses its connection for them, again and again."""
    read, answers, others = [], [], []

    async def group_or_new(name):
        return SubscriptionGroup(name)

    class Reader(FailingReader):
        def _fetch(self, *_):
            read.append(threading.current_thread())
            return GetResult(GetStatus.FOUND, next_begin_offset=1)

    async def whole(executor):
        names = SimpleNamespace(is_of_slave=False, suggests_slaves=False, group_or_new=group_or_new)
        pulls, asked = Pulls(Reader(), names, None, None, executor), Asked(answers)

        class Filling(list):
            def append(self, answer):
                answers.append(answer)
                asked.connection.pause_writing()

        def pull(found):
            each = Asked(found)
            if found is answers:
                each.connection = asked.connection
                each.answers = Filling()
            return Pull(each, "T", 1, 0, 32, subscription_of("T", "a > 1", 0, "SQL92"), 0)

        async def far(each):
            each.request.reply(await pulls._pull_far(each, 0))

        asked.connection.pause_writing()
        waiting = [asyncio.create_task(far(pull(answers))) for _ in range(20)]
        for _ in range(20):
            hold(pulls, pull(answers))
        pulls._reader.has_messages = True
        await pulls.arrivals.check()
        await far(pull(others))
        for _ in range(40):
            await executor.run(int)
        assert len(others) == 1 and len(read) == 1 and not answers
        pulls._pull = lambda request, group, config: group
        of_new_group = asyncio.create_task(pulls._pull_of_new_group(asked, "new"))
        await executor.run(int)
        assert not of_new_group.done()
        for answered in range(0, 40, FAR_READS_MAX):
            assert len(answers) == answered
            asked.connection.resume_writing()
            for _ in range(40):
                await executor.run(int)
        await asyncio.gather(*waiting, *pulls._tasks)
        assert await of_new_group == "new" and len(answers) == 40 and pulls.held == 0

    with TurnExecutor(1, "test") as executor:
        asyncio.run(whole(executor))


def test_a_held_pull_is_read_once_its_client_reads():
    """Otherwise messages that come at once in many queues end the connection of a client that reads."""
    answers, read = [], []

    class Reader(FailingReader):
        def _get_records(self, *_):
            read.append(threading.current_thread())
            return super()._get_records(*_)

    async def whole(executor):
        pulls, asked, gone = Pulls(Reader(), OF_MASTER, None, None, executor), Asked(answers), Asked(answers)
        for request in (asked, gone):
            request.connection.pause_writing()
            hold(pulls, Pull(request, "good", 1, 0, 32, subscription_of("good", "*", 0, None), 0))
        pulls._reader.has_messages = True
        for _ in range(3):
            await pulls.arrivals.check()
            await executor.run(int)
        assert pulls.held == len(pulls._tasks) == 2 and not read and not answers
        gone.connection.is_closed = True
        for request in (asked, gone):
            request.connection.resume_writing()
        await asyncio.gather(*pulls._tasks)
        await pulls.arrivals.check()
        assert len(read) == len(answers) == 1 and pulls.held == 0

    with TurnExecutor(1, "test") as executor:
        asyncio.run(whole(executor))


def test_a_slave_keeps_nothing_of_the_groups_that_pull():
    """Their names are its clients' alone: it enters no group, and serves no pops that ask who pulls."""
    def refuse(name, advice):
        raise RequestRefusedError(codes.TOPIC_NOT_EXIST, name)

    def pull(is_of_slave):
        names = SimpleNamespace(is_of_slave=is_of_slave, group=SubscriptionGroup, existing=refuse)
        pulls, asked = Pulls(FailingReader(), names, None, None, None), Asked([])
        asked.frame.fields.update({name: str(text) for name, text in pull_fields("T", group="invented").items()})
        with pytest.raises(RequestRefusedError):
            pulls.pull(asked)
        return pulls.is_pulling("invented"), len(pulls._pulled)

    assert pull(False) == (True, 1) and pull(True) == (False, 0)


def test_held_pulls_are_looked_at_again_only_where_messages_may_have_come():
    """With hundreds of queues the looks at all of them for each message took longer than its delivery."""
    looked, arrived, answers = [], set(), []

    class Reader(FailingReader):
        def _look(self, topic, queue_id, level):
            arrived.discard(queue_id)
            return queue_id

        def _has_arrived(self, look):
            return look in arrived

        def _queue(self, topic, queue_id):
            looked.append(queue_id)
            return super()._queue(topic, queue_id)

    async def whole():
        reader = Reader()
        pulls = Pulls(reader, OF_MASTER, None, None, None)
        for queue_id in range(10):
            hold(pulls, Pull(Asked(answers), "good", queue_id, 0, 32, subscription_of("good", "*", 0, None), 0))
        assert looked == list(range(10))
        await pulls.arrivals.check()
        assert looked == list(range(10)) and not answers
        reader.has_messages = True
        arrived.update((3, 7))
        await pulls.arrivals.check()
        assert looked[10:] == [3, 7] and len(answers) == 2 and pulls.held == 8

    asyncio.run(whole())


@pytest.mark.parametrize("queue_ids", [range(10), [1] * 10], ids=["many queues", "one queue"])
def test_a_look_at_many_held_pulls_gives_others_their_turn(monkeypatch, queue_ids):
    monkeypatch.setattr("pyengine.gateway.pulls.ANSWER_SLICE_S", 0.0)
    answers, turns = [], []

    async def whole():
        reader = FailingReader()
        pulls = Pulls(reader, OF_MASTER, None, None, None)
        for queue_id in queue_ids:
            hold(pulls, Pull(Asked(answers), "good", queue_id, 0, 32, subscription_of("good", "*", 0, None), 0))
        reader.has_messages = True
        checking = asyncio.create_task(pulls.arrivals.check())
        while pulls.held:
            await asyncio.sleep(0)
            turns.append(len(answers))
            assert checking.done() == (not pulls.held)

    asyncio.run(whole())
    assert all(later - earlier in (0, 1) for earlier, later in itertools.pairwise([0, *turns])) and len(answers) == 10


def test_many_held_pulls_of_one_host_delay_no_others(monkeypatch):
    monkeypatch.setattr("pyengine.gateway.pulls.ANSWERS_S", 0.0)
    order = []

    def held_by(host, number):
        asked = Asked([])
        asked.connection.host, asked.reply = host, lambda answer: (setattr(asked, "_is_open", False), order.append(host))
        return Pull(asked, "good", number % 3, 0, 32, subscription_of("good", "*", 0, None), 0)

    async def whole():
        pulls = Pulls(FailingReader(), OF_MASTER, None, None, None)
        for number in range(100):
            hold(pulls, held_by("192.0.2.6", number))
        hold(pulls, held_by("192.0.2.7", 0))
        pulls._reader.has_messages = True
        for answered in range(1, 4):
            await pulls.arrivals.check()
            assert len(order) == answered, "what is left is for the next check"
        monkeypatch.setattr("pyengine.gateway.pulls.ANSWERS_S", 60.0)
        await pulls.arrivals.check()
        assert "192.0.2.7" in order[:5]

    asyncio.run(whole())
    assert len(order) == 101


def test_a_pull_is_held_without_a_look_at_the_others_of_its_queue():
    """Otherwise each one takes longer than the one before."""
    looks = []

    class Reader(FailingReader):
        def _get_records(self, topic, queue_id, offset, *_):
            looks.append(offset)
            return GetRecords(GetStatus.OFFSET_OVERFLOW_ONE, next_begin_offset=offset)

    async def whole():
        pulls = Pulls(Reader(), OF_MASTER, None, None, None)
        pulls._reader.has_messages = True  # which none of them gets
        for number in range(10):
            hold(pulls, Pull(Asked([]), "good", 1, -number, 32, subscription_of("good", "*", 0, None), -number))
        assert pulls.held == 10

    asyncio.run(whole())
    assert looks == [-number for number in range(10)]


def test_a_group_that_may_not_consume_or_not_by_broadcast_is_refused(served, topic):
    client = served.broker()
    assert client.ask(codes.SEND_MESSAGE_V2, send_fields(topic), b"hello").code == codes.SUCCESS
    groups = SubscriptionGroups(served.root)
    by_heartbeat = pull_fields(topic, group="shared", sysFlag=0)
    groups.put(SubscriptionGroup("shared", consume_broadcast_enable=False))
    for model, code in (("CLUSTERING", codes.SUCCESS), ("BROADCASTING", codes.NO_PERMISSION)):
        heartbeat(client, "me", "shared", subscription(topic), model=model)
        eventually(lambda: client.ask(codes.PULL_MESSAGE, by_heartbeat).code != codes.PULL_NOT_FOUND, "the message is in its queue")
        answer = client.ask(codes.PULL_MESSAGE, by_heartbeat)
        assert answer.code == code
    assert answer.remark == "the consumer group[shared] can not consume by broadcast way"
    groups.put(SubscriptionGroup("shared", consume_enable=False))
    answer = client.ask(codes.PULL_MESSAGE, by_heartbeat)
    assert (answer.code, answer.remark) == (codes.NO_PERMISSION, "subscription group no permission, shared")


def test_a_long_subscription_is_refused(served, topic):
    answer = served.broker().ask(codes.PULL_MESSAGE, pull_fields(topic, subscription="a || " * 20_000))
    assert (answer.code, answer.remark) == (codes.SUBSCRIPTION_PARSE_FAILED, "a subscription of more than 65536 characters")
