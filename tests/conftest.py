"""Pytest's hooks for all tests: options, needs, seeds, timeouts, and the table of tests that were left out.

Fixtures live in tests/fix_<topic>.py; each is loaded as a plugin. Needs are in needs.py.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

import needs
from waiting import scaled_timeout_s

# If PYTHONDONTWRITEBYTECODE is set, each process of each run would compile all test files: 15 s of CPU each time.
sys.dont_write_bytecode = False

pytest_plugins = sorted(path.stem for path in Path(__file__).parent.glob("fix_*.py"))

def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ci", action="store_true", help="run what .ci/run adds to the default run")
    parser.addoption("--long", action="store_true", help="run the long forms too (also PYENGINE_LONG=1)")


def pytest_configure(config: pytest.Config) -> None:
    try:
        config.required_needs = needs.required_needs()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.run_long = (
        config.getoption("--long") or os.environ.get("PYENGINE_LONG", "0") != "0" or "long" in config.required_needs
    )
    config.run_ci = config.run_long or config.getoption("--ci") or "ci" in config.required_needs
    # A shell's background job starts with SIGINT ignored, nohup's with SIGHUP, and so would everything that tests start.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    given = getattr(config, "workerinput", {}).get("test_seed")  # one seed for a run, however many processes it has
    config.test_seed = given or int(os.environ.get("PYENGINE_SEED") or random.SystemRandom().randrange(1 << 32))
    if "hypothesis" in sys.modules:
        sys.modules["hypothesis"].settings.register_profile("loaded", deadline=None)
        sys.modules["hypothesis"].settings.load_profile("loaded")


def pytest_report_header(config: pytest.Config) -> list[str]:
    required = ", ".join(sorted(config.required_needs)) or "none"
    return [f"seed: {config.test_seed} (PYENGINE_SEED={config.test_seed} repeats it)", f"required needs: {required}"]


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> str:
    """The seed of this test, of the run's seed and the test's name, so that the test alone has the same seed."""
    return f"{request.config.test_seed}:{request.node.nodeid}"


@pytest.fixture
def rng(seed: str) -> random.Random:
    """Random numbers that PYENGINE_SEED repeats; a failing test shows the seed."""
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(autouse=True)
def environment_as_found():
    """A variable that a test leaves behind would reach every later test of this process, and the programs that those start."""
    before = dict(os.environ)
    yield
    left = {name: os.environ.get(name) for name in before.keys() | os.environ.keys()
            if os.environ.get(name) != before.get(name) and name not in ("PYTEST_CURRENT_TEST", "_RJEM_MALLOC_CONF")}  # Polars sets it
    for name in left:
        os.environ.pop(name, None)
        os.environ.update({name: before[name]} if name in before else {})
    assert not left


def why_left_out(item: pytest.Item) -> tuple[str, str] | None:
    """The first need of the test that is not met, with the reason."""
    if item.get_closest_marker("long") and not item.config.run_long:
        return "long", "runs with --long or PYENGINE_LONG=1"
    if item.get_closest_marker("ci") and not item.config.run_ci:
        return "ci", "runs with --ci, as .ci/run does, or --long"
    for name, need in needs.NEEDS.items():
        if item.get_closest_marker(name) and (reason := need.absent()):
            return name, reason
    return None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Scale the test's timeout by the load of the machine before pytest-timeout reads it."""
    marker = item.get_closest_marker("timeout")
    timeout_s = marker.args[0] if marker else float(item.config.getini("timeout") or 0)
    if timeout_s:
        item.add_marker(pytest.mark.timeout(scaled_timeout_s(timeout_s)), append=False)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    missing = why_left_out(item)
    if missing:
        pytest.skip("{}: {}".format(*missing))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """A skip of a test with a required need is a failure, wherever it came from; but what the run does not
    ask for, such as a long form, is left out whatever else it needs."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = _reason(report)
        why = reason.partition(": ")[0]  # left out for that need alone, whatever else it needs
        wanted = {why} if why in needs.FORMS or why in needs.NEEDS else item.config.required_needs
        broken = sorted(name for name in wanted & item.config.required_needs if item.get_closest_marker(name))
        if broken:
            report.outcome = "failed"
            report.longrepr = f"left out although PYENGINE_REQUIRE names {', '.join(broken)}: {reason}"
    return report


def _reason(report: pytest.TestReport) -> str:
    return report.longrepr[2].removeprefix("Skipped: ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left_out = Counter(map(_reason, terminalreporter.stats.get("skipped", ())))
    terminalreporter.section("left out")
    if not left_out:
        terminalreporter.write_line("nothing: every selected test ran")
    for reason, count in sorted(left_out.items()):
        terminalreporter.write_line(f"{count:5}  {reason}")
