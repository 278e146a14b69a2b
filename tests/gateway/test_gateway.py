"""The gateway as a whole: where it listens, how it comes and goes, what it writes into the log."""

from __future__ import annotations

import asyncio
import resource
import socket

import psutil
import pytest

from crash.replicas import free_port
from fix_gateway import start_served
from pyengine.errors import EngineError
from pyengine.gateway import codes
from pyengine.gateway.gateway import REPORT_WINDOW_S, REPORTS_MAX, Reports, repeat
from reported import Reported


def test_it_listens_for_this_machine_alone_by_default(served):
    process = psutil.Process(served.engine.pid("gateway"))
    listening = {connection.laddr for connection in process.net_connections() if connection.status == psutil.CONN_LISTEN}
    assert {address.ip for address in listening} == {"127.0.0.1"} and set(served.ports) <= {address.port for address in listening}


def test_an_engine_without_the_setting_has_none(make_engine):
    engine = make_engine()
    engine.start()
    assert "gateway" not in engine.pids()


def test_the_port_less_two_is_served_too(tmp_path):
    served = start_served(tmp_path / "store", gateway_broker_port=free_port())
    try:
        socket.create_connection(("127.0.0.1", served.ports[1] - 2), 30).close()
    finally:
        served.close()


def test_a_start_with_a_taken_gateway_port_fails_with_the_reason_in_the_log(make_engine):
    with socket.create_server(("127.0.0.1", 0)) as other:
        engine = make_engine(gateway_enable=True, gateway_namesrv_port=0, gateway_broker_port=other.getsockname()[1])
        with pytest.raises(EngineError):
            engine.start()
    assert "cannot listen" in engine.log()


def test_a_client_with_many_slow_requests_holds_up_no_other(served, topic):
    """Each of them writes a file: they wait for a thread, and no others behind them."""
    one, other = served.name_server(), served.broker()
    sent = [one.send(codes.DELETE_KV_CONFIG, {"namespace": "none", "key": key}) for key in range(400)]
    assert one.ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}).code == codes.SUCCESS, "they are all read"
    found = other.ask(codes.SEARCH_OFFSET_BY_TIMESTAMP, {"topic": topic, "queueId": 1, "timestamp": 0})
    assert found.code == codes.SUCCESS
    assert one.ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}).code == codes.SUCCESS
    assert not one.is_answered(sent[-1]), "the first client's wait on"


def test_sentences_about_clients_are_few():
    reported, clock = Reported(), [0.0]
    report = Reports(reported, lambda: clock[0])
    for number in range(1000):
        report("h", f"sentence {number}\nsecond line" + "x" * 1000)
    assert len(reported) == REPORTS_MAX and all(len(text) < 600 and "\n" not in text for text in reported)
    clock[0] += REPORT_WINDOW_S
    report("h", "later")
    assert reported[REPORTS_MAX:] == [f"{1000 - REPORTS_MAX} more sentences about clients were left out", "client h: later"]


def test_a_repeated_step_continues_after_failures_and_reports_equal_ones_in_a_row_once():
    fails = [EngineError("no room"), EngineError("no room"), ValueError("odd"), None, ValueError("odd")]
    reported, done = Reported(), []

    async def whole():
        over = asyncio.Event()

        def step():
            done.append(None)
            if len(done) > len(fails):
                over.set()
            elif (error := fails[len(done) - 1]) is not None:
                raise error

        task = asyncio.create_task(repeat(0, step, reported, "it failed"))
        await asyncio.wait_for(over.wait(), 60)
        task.cancel()

    asyncio.run(whole())
    assert reported == ["it failed: no room", "it failed: ValueError('odd')", "it failed: ValueError('odd')"]


def test_it_may_open_a_file_for_each_connection(make_engine):
    engine = make_engine(gateway_enable=True, gateway_namesrv_port=0, gateway_broker_port=0, gateway_connections_max=3000)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    engine.start()
    soft = psutil.Process(engine.pid("gateway")).rlimit(psutil.RLIMIT_NOFILE)[0]
    assert soft == resource.RLIM_INFINITY or soft >= (3512 if hard == resource.RLIM_INFINITY else min(hard, 3512))
