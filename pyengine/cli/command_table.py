"""Every command: its module and the section of the help it stands in.

A command's module is imported only when it is called, so that `pyengine status`
never waits for what `pyengine export` needs.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    name: str
    module: str
    attribute: str
    section: str


COMMANDS = (
    Row("start", "pyengine.cli.start", "start", "Run a store"),
    Row("stop", "pyengine.cli.stop", "stop", "Run a store"),
    Row("status", "pyengine.cli.status", "status", "Run a store"),
    Row("top", "pyengine.cli.top", "top", "Run a store"),
    Row("metrics", "pyengine.cli.metrics", "metrics", "Run a store"),
    Row("promote", "pyengine.cli.promote", "promote", "Run a store"),
    Row("clean", "pyengine.cli.clean", "clean", "Run a store"),
    Row("put", "pyengine.cli.put", "put", "Write and read"),
    Row("ingest", "pyengine.cli.ingest", "ingest", "Write and read"),
    Row("get", "pyengine.cli.get", "get", "Write and read"),
    Row("tail", "pyengine.cli.tail", "tail", "Write and read"),
    Row("topics", "pyengine.cli.topics", "topics", "Write and read"),
    Row("groups", "pyengine.cli.groups", "groups", "Write and read"),
    Row("query", "pyengine.cli.query", "query", "Look up"),
    Row("message", "pyengine.cli.message", "message", "Look up"),
    Row("offset-at", "pyengine.cli.offset_at", "offset_at", "Look up"),
    Row("check", "pyengine.cli.check", "check", "Check and repair"),
    Row("recover", "pyengine.cli.recover", "recover", "Check and repair"),
    Row("rebuild", "pyengine.cli.rebuild", "rebuild", "Check and repair"),
    Row("salvage", "pyengine.cli.salvage", "salvage", "Check and repair"),
    Row("replay", "pyengine.cli.replay", "replay", "Check and repair"),
    Row("prove", "pyengine.cli.prove", "prove", "Check and repair"),
    Row("inspect", "pyengine.cli.inspect", "inspect", "Look inside"),
    Row("stats", "pyengine.cli.stats", "stats", "Look inside"),
    Row("report", "pyengine.cli.report", "report", "Look inside"),
    Row("export", "pyengine.cli.export", "export", "Look inside"),
    Row("dump", "pyengine.cli.dump", "dump", "Look inside"),
    Row("config", "pyengine.cli.config", "config", "Look inside"),
)
BY_NAME = {row.name: row for row in COMMANDS}
SECTIONS = tuple(dict.fromkeys(row.section for row in COMMANDS))
