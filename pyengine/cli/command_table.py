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
    Row("dump", "pyengine.cli.dump", "dump", "Look inside"),
    Row("config", "pyengine.cli.config", "config", "Look inside"),
)
BY_NAME = {row.name: row for row in COMMANDS}
SECTIONS = tuple(dict.fromkeys(row.section for row in COMMANDS))
