"""A real broker opens the directory that the engine and its gateway left, and they the one that the broker left: both go on."""

from __future__ import annotations

import contextlib
import re
import time

import pytest

import needs
import pyengine
from crash.replicas import free_port
from fix_gateway import start_served
from fix_judge import available
from interop.clients import Clients
from interop.real_broker import RealBroker
from pyengine.formats.constants import SCHEDULE_TOPIC, TIMER_TOPIC
from pyengine.ipc.live_reader import check_now
from pyengine.storage.config import load_config
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets
from waiting import eventually

pytestmark = [pytest.mark.java, pytest.mark.maven, pytest.mark.long, pytest.mark.timeout(600)]

DELAYS = "1s 15s"
LATER = 2  # the level that is longer than it takes to change hands


@pytest.fixture
def rig(tmp_path):
    """(our engine with its gateway, running; the real broker; clients): one after the other at the same two ports."""
    name_server, broker = free_port(), free_port()
    java = needs.java_command()
    served = start_served(tmp_path / "store", gateway_namesrv_port=name_server, gateway_broker_port=broker, message_delay_level=DELAYS,
                          transaction_timeout_ms=600_000)
    with contextlib.closing(served), available():
        real = RealBroker(java, served.root, tmp_path / "real", name_server, broker, mappedFileSizeCommitLog=1 << 20,
                          mappedFileSizeConsumeQueue=6000, maxHashSlotNum=1000, maxIndexNum=4000, messageDelayLevel=DELAYS,
                          transactionTimeOut=1000, transactionCheckInterval=1000, transactionCheckMax=1000)
        try:
            with Clients(java, f"127.0.0.1:{name_server}", tmp_path) as clients:
                yield served, real, clients
        finally:
            real.kill()


class Side:
    """What a user does on one side, and what must be true of it on the other. `name` is in all bodies."""

    def __init__(self, served, clients, name: str) -> None:
        self.served, self.clients, self.name = served, clients, name

    def send(self, *bodies, **how):
        """Send, again while the clients look for the broker that has just come; the answers."""
        def sent(body):
            (answer,) = self.clients.ask("send", group="senders", how="sync", topic="handed", tags="t", go_on=True,
                                         bodies=[f"{self.name}-{body}"], **how)
            return not isinstance(answer, str) and answer

        return [eventually(lambda body=body: sent(body), f"{body} is sent", timeout_s=90) for body in bodies]

    def consume(self, consumer, expected):
        """Let the group consume until it has these; all that it got, and what is left of them is what came twice."""
        self.clients.ask("subscribe", name=consumer, group="readers", topic="handed")
        eventually(lambda: expected <= self.taken(consumer), f"{consumer} has {expected}", timeout_s=120)

    def taken(self, consumer):
        return {row["body"] for row in self.clients.ask("take", name=consumer, count=0, timeout_s=0)}

    def leave(self, consumer, committed):
        """Stop a consumer whose offsets are written."""
        eventually(lambda: sum(ConsumerOffsets(self.served.root).read("handed", "readers").values()) == committed,
                   f"{committed} messages are consumed in the file of offsets", timeout_s=90)
        self.clients.ask("stop", name=consumer)

    def admin(self, *words):
        return self.clients.ask("admin", arguments=list(words))


def test_a_real_broker_takes_the_directory_over_and_gives_it_back(rig):
    served, real, clients = rig
    ours = Side(served, clients, "ours")
    first = ours.send(*range(20))
    ours.consume("one", {f"ours-{number}" for number in range(20)})
    ours.leave("one", 20)
    ours.send("left-0", "left-1", "left-2")
    assert "success" in ours.admin("updateTopic", "-b", real.address, "-t", "by_tool", "-r", "3", "-w", "3")
    assert "success" in ours.admin("updateSubGroup", "-b", real.address, "-g", "by_tool_group", "-r", "5")
    topics = TopicConfigs(served.root)
    topics.create(TopicConfig("deleted"))
    topics.delete("deleted")
    clients.ask("decide", yes=False)
    (half,) = clients.ask("transact", group="payers", topic="handed", outcome="UNKNOW", bodies=["ours-half"])
    assert half["status"] == "SEND_OK"
    ours.send("delayed", delay=LATER)
    assert served.engine.stop()

    real.start()
    theirs = Side(served, clients, "theirs")
    theirs.consume("two", {"ours-left-0", "ours-left-1", "ours-left-2", "ours-delayed"})
    clients.ask("decide", yes=True)
    eventually(lambda: "ours-half" in theirs.taken("two"), "the broker has asked for the end of our transaction", timeout_s=120)
    assert theirs.taken("two") == {"ours-left-0", "ours-left-1", "ours-left-2", "ours-delayed", "ours-half"}, "offsets went on"
    assert '"readQueueNums":3' in "".join(theirs.admin("topicRoute", "-t", "by_tool").split())
    assert re.search(r"retryMaxTimes\s+=\s+5", theirs.admin("getConsumerConfig", "-g", "by_tool_group"))
    assert first[7]["unique"] in theirs.admin("queryMsgByKey", "-t", "handed", "-k", "ours-7")
    assert first[8]["id"] in theirs.admin("queryMsgById", "-i", first[8]["id"])
    second = theirs.send(*range(10))
    eventually(lambda: len(theirs.taken("two")) == 15, "they are consumed")
    theirs.leave("two", 35)
    theirs.send("left-0", "left-1")
    assert "success" in theirs.admin("updateTopic", "-b", real.address, "-t", "by_their_tool", "-r", "5", "-w", "5")
    clients.ask("decide", yes=False)
    clients.ask("transact", group="payers", topic="handed", outcome="UNKNOW", bodies=["theirs-half"])
    eventually(lambda: half_messages(served.root) >= 4, "the broker has asked, and put the half message back", timeout_s=90)
    theirs.send("delayed", delay=LATER)
    real.stop()

    assert {"by_tool", "by_their_tool"} <= (left := topics.read()).rows.keys() and "deleted" not in left.rows
    assert not (told := check_now(served.root, load_config(served.root))).findings, told.to_dict()
    served.engine.start(transaction_timeout_ms=500, transaction_check_interval_ms=500, transaction_check_max=1000)
    back = Side(served, clients, "back")
    back.consume("three", {"theirs-left-0", "theirs-left-1", "theirs-delayed"})
    clients.ask("decide", yes=True)
    eventually(lambda: "theirs-half" in back.taken("three"), "our gateway has asked for the end of their transaction", timeout_s=120)
    assert back.taken("three") == {"theirs-left-0", "theirs-left-1", "theirs-delayed", "theirs-half"}, "offsets went on"
    assert '"readQueueNums":5' in "".join(back.admin("topicRoute", "-t", "by_their_tool").split())
    assert second[7]["unique"] in back.admin("queryMsgByKey", "-t", "handed", "-k", "theirs-7")
    back.send("last")
    eventually(lambda: "back-last" in back.taken("three"), "it goes on")
    assert served.engine.stop()
    assert not (told := check_now(served.root, load_config(served.root))).findings, told.to_dict()


def test_a_real_broker_routes_a_topic_of_a_plain_put_and_keeps_messages_with_times_of_their_own(rig):
    served, real, clients = rig
    with pyengine.connect(served.root) as producer:
        for number in range(5):
            assert producer.put("plain", b"plain-%d" % number, queue_id=number % 4).ok
        soon_ms = int(time.time() * 1000) + 45_000  # more than level 2, so that it waits again in any case
        assert producer.put("plain", b"soon", queue_id=1, tags="t", keys="k", deliver_at=soon_ms).topic == SCHEDULE_TOPIC
        assert producer.put("plain", b"in a day", queue_id=2, deliver_at=soon_ms + 86_400_000).topic == SCHEDULE_TOPIC
    assert served.engine.stop()
    assert queue_end(served.root, TIMER_TOPIC) == 0

    real.start()
    theirs = Side(served, clients, "theirs")
    route = "".join(eventually(lambda: "readQueueNums" in (told := theirs.admin("topicRoute", "-t", "plain")) and told, "it is routed"))
    assert '"readQueueNums":8' in "".join(route.split())
    clients.ask("subscribe", name="plain", group="plain-readers", topic="plain")
    plain = {f"plain-{number}" for number in range(5)}
    eventually(lambda: theirs.taken("plain") == plain, "a client of the broker consumes them", timeout_s=120)
    eventually(lambda: queue_end(served.root, TIMER_TOPIC) == 2, "the broker has delivered both to our own topic", timeout_s=120)
    assert theirs.taken("plain") == plain, "neither came early"
    clients.ask("stop", name="plain")
    real.stop()

    assert not (told := check_now(served.root, load_config(served.root))).findings, told.to_dict()
    served.engine.start()
    with pyengine.consume(served.root, "plain", group="back", from_="first") as consumer:
        found = []
        eventually(lambda: found.extend(consumer.pull(timeout_s=1)) or len(found) >= 6, "what waited for less is delivered", timeout_s=120)
    (soon,) = [one for one in found if one.body == b"soon"]
    assert (soon.queue_id, soon.tags, soon.keys) == (1, "t", "k") and soon.store_timestamp_ms >= soon_ms
    assert {one.body.decode() for one in found} == plain | {"soon"}
    with pyengine.open_store(served.root) as store:
        waiting = store.get_message(SCHEDULE_TOPIC, LATER - 1, 2, level="committed").messages
    assert any(one.body == b"in a day" for one in waiting), "the other waits on"
    assert served.engine.stop()
    assert not (told := check_now(served.root, load_config(served.root))).findings, told.to_dict()


def half_messages(root):
    return queue_end(root, "RMQ_SYS_TRANS_HALF_TOPIC")


def queue_end(root, topic):
    with pyengine.open_store(root) as store:
        return store.queue_range(topic, 0, "committed")[1]
