"""Several tests at once (`-n`, pytest-xdist): a file's tests stay together, and what takes longest begins first."""

from __future__ import annotations

import os

import pytest

SPARK = "tests/spark"
LONGEST_FIRST = ("tests/test_sanitizers.py", SPARK, "tests/scripts", "tests/faults", "tests/interop", "tests/systemd", "tests/engine",
                 "tests/test_docs", "tests/test_examples.py")

# C1 alone: a JVM of a test ends before what the second compiler makes pays for itself.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def group(nodeid: str) -> str:
    """Return what one process runs in order: a file, for its fixtures; all of tests/spark, for the one session."""
    return SPARK if nodeid.startswith(SPARK + "/") else nodeid.partition("::")[0]


def place(nodeid: str) -> int:
    """Its index in the run."""
    return next((number for number, start in enumerate(LONGEST_FIRST) if nodeid.startswith(start)), len(LONGEST_FIRST))


class AtOnce:
    """Hooks of pytest-xdist; registered only where tests run at once."""

    @pytest.hookimpl
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log):
        from xdist.scheduler import LoadScopeScheduling

        class ByGroup(LoadScopeScheduling):
            def _split_scope(self, nodeid: str) -> str:
                return group(nodeid)

        config.option.loadscopereorder = False  # by the number of tests, where the few are the long ones
        return ByGroup(config, log)

    @pytest.hookimpl
    def pytest_configure_node(self, node) -> None:
        node.workerinput["test_seed"] = node.config.test_seed


@pytest.hookimpl(trylast=True)  # after xdist's, which registers it
def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("dsession"):
        config.pluginmanager.register(AtOnce())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: place(item.nodeid))
