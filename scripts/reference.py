"""Generates docs/commands.md, configuration.md and events.md, and parts of spark.md and upgrades.md, from the code.

`python scripts/reference.py docs` writes them. A test compares them with the code, so they are up to date.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyengine.cli.main import COMMANDS, SECTIONS, CommandLine
from pyengine.engine_config import AT_ONCE, DAY_MS, INT32_MAX, KEPT_NAMES, SETTINGS
from pyengine.events import ERROR, INFO, NOTHING, WARNING, Event
from pyengine.settings import Setting
from pyengine.storage.config import ENV_PREFIX, FIXED_NAMES, INERT_KEYS, REFUSED_KEYS, fold

if TYPE_CHECKING:
    from pyengine.spark.schema import Column

EVERYWHERE = ("--set", "--json")
GROUPS = {
    "files": "Sizes of files, fixed at creation",
    "writing": "Writing",
    "replication": "Replication",
    "gateway": "Clients of RocketMQ",
    "dispatch": "Queues, index, recovery",
    "reading": "Reading",
    "cleaning": "Deleting old messages, and the room on the disk",
    "processes": "Processes and shared memory",
}


def configuration_page() -> str:
    """Return docs/configuration.md: every setting by group, with range, default and RocketMQ's key."""
    lines = [
        "# Settings", "",
        "Made from the table in `pyengine/engine_config.py`. `pyengine config explain STORE` shows a store's values and their sources.",
        "A later source wins: `STORE/config/engine.toml` (TOML: `name = \"24h\"`), the environment "
        f"(`{ENV_PREFIX}<NAME>`), a broker's file (`--broker-conf`), `--set name=value`.", "",
        "Each setting has its default beside it. RocketMQ's key is the name without the unit, or stands in brackets; it is accepted "
        "too. Case, `_`, `-` and `.` do not "
        "matter.\nA size may end in K, M, G, KiB, MiB or GiB (powers of 1024), a time in ms, s, m, h or d. Without bounds a time is at "
        "most a day,\na number 2,147,483,647.", "",
        "**Fixed at creation:** " + ", ".join(f"`{name}`" for name in FIXED_NAMES) + ".\nAny other value is refused. For a store of "
        "RocketMQ's they come from its files, or from `--set`.", "",
        "*Live* settings change while an engine runs, by `pyengine config set STORE name=value`, or by SIGHUP to the supervisor after an "
        "edit of the file;\nothers need a restart.", "",
        "**Kept from the last start**, for recovery and other commands: "
        + ", ".join(f"`{name}`" for name in KEPT_NAMES) + ".", "",
    ]
    for group, title in GROUPS.items():
        rows = [row for row in SETTINGS.values() if row.group == group]
        lines += [f"## {title}", ""]
        lines += [f"- `{row.name}={row.show(row.default)}`{_notes(row)}: {row.meaning}" for row in rows]
        lines.append("")
    lines += ["## Known to RocketMQ, accepted, without effect here", "", ", ".join(f"`{key}`" for key in INERT_KEYS) + ".", "",
              "## Without a setting", "",
              "`mqadmin updateBrokerConfig` accepts other keys of RocketMQ's broker without effect, and refuses other values of these:", ""]
    lines.append(", ".join(f"`{key}{f'={held}' if held else ''}`" for key, (held, _) in REFUSED_KEYS.items()) + ". The refusal says why.")
    return "\n".join(lines) + "\n"


def _notes(row: Setting) -> str:
    """Return in brackets RocketMQ's key and the range where they are not as of all such settings, and whether a change is live."""
    bounds = row.allowed().removesuffix(f" to {DAY_MS:,} ms").removesuffix(f" to {INT32_MAX:,} bytes").removesuffix(f" to {INT32_MAX:,}")
    if bounds in ("text", "true or false", "0", "1"):
        bounds = ""
    elif bounds != row.allowed():
        bounds = f"from {bounds}"
    live = {"": "", AT_ONCE: "*live*"}.get(row.live, f"*live {row.live.removesuffix(' afterwards')}*")
    derived = {fold(row.name), fold(row.name.removesuffix(f"_{row.unit}")), fold(row.name.removesuffix("_hours"))}
    key = f"`{row.key}`" if row.key and fold(row.key) not in derived else ""
    notes = ", ".join(each for each in (key, bounds, live) if each)
    return f" ({notes})" if notes else ""


def commands_page() -> str:
    """Return docs/commands.md: usage, text and options of every command, by section.

    It does not use click's formatting, so that the page does not depend on click's version.
    """
    root = root_command()
    shared = _shared_options(root)
    lines = ["# Commands", "", "Made from the commands themselves; `pyengine` is `python -m pyengine`.", "",
             *_text(root.help), *_text(root.epilog), "Options of several commands, which name them only:", "", *shared, ""]
    for section, names in SECTIONS.items():
        lines += [f"## {section}", ""]
        for name in names:
            for path, command in _commands(name, root.command_of(name)):
                usage = f"pyengine {path}{_usage(command)}"
                lines += [f"### `{usage}`", "", *_text(command.help, without=usage)]
                lines += _options(command, shared)
    return "\n".join(lines).rstrip() + "\n"


def root_command() -> CommandLine:
    from pyengine.cli.main import main as root

    return root


def _commands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, child in sorted(command.commands.items()):
            yield from _commands(f"{path} {name}", child)


def _usage(command: click.Command) -> str:
    if isinstance(command, click.Group):
        return " COMMAND"
    words = [_word(param) for param in command.params if isinstance(param, click.Argument)]
    return "".join(f" {word}" for word in words)


def _word(argument: click.Argument) -> str:
    """Return an argument as the usage line has it: the choices where it has some, in brackets if it may be left out."""
    word = argument.metavar or ("|".join(map(str, argument.type.choices)) if isinstance(argument.type, click.Choice)
                                else (argument.name or "").upper())
    word = word.removesuffix("...")
    if not argument.required and not word.startswith("["):
        word = f"[{word}]"
    return f"{word}..." if argument.nargs == -1 else word


def _text(text: str | None, without: str = "") -> list[str]:
    """Convert a help text to Markdown: what click prints unchanged (after its \\b mark) becomes a code block, without such an example."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        rows = paragraph.strip("\n").splitlines()
        if rows and rows[0] == "\b":
            shown = [row for row in rows[1:] if row.strip() not in ("Example:", "Examples:", without)]
            lines += ["```", *shown, "```", ""] if shown else []
        elif rows:
            lines += [*rows, ""]
    return lines


def _options(command: click.Command, shared: Collection[str]) -> list[str]:
    """Return a list of a command's own options; EVERYWHERE has those of all, and `shared` those of several."""
    rows = _option_rows(command)
    named = [row.partition(":")[0].removeprefix("- ") for row in rows if row in shared]
    rows = [row for row in rows if row not in shared] + ([f"- {', '.join(named)}"] if named else [])
    return [*rows, ""] if rows else []


def _option_rows(command: click.Command) -> list[str]:
    rows = []
    for param in command.params:
        if isinstance(param, click.Option) and param.opts[-1] not in EVERYWHERE:
            kind = "" if param.is_flag or param.count else f" {param.metavar or _kind(param.type)}"
            notes = [param.help or "", "Required." if param.required else _default(param)]
            rows.append(f"- `{', '.join(param.opts + param.secondary_opts)}{kind}`: {' '.join(note for note in notes if note)}")
    return rows


def _shared_options(root: CommandLine) -> list[str]:
    """Return the options that two commands or more have in the same words, each name in its most frequent ones."""
    commands = [command for name in COMMANDS for _, command in _commands(name, root.command_of(name))]
    counts = Counter(row for command in commands for row in _option_rows(command))
    by_name = {row.partition(":")[0]: row for row, count in reversed(counts.most_common()) if count > 1}
    return sorted(by_name.values())


def _default(option: click.Option) -> str:
    """Return a sentence with the default of an option that shows it: the form of a flag, a number without needless zeros."""
    if not option.show_default or not isinstance(option.default, (int, float, str)):
        return ""
    if isinstance(option.default, bool):
        forms = option.opts if option.default else option.secondary_opts
        return f"Default: `{forms[0]}`." if forms else ""
    return f"Default: {f'{option.default:g}' if isinstance(option.default, float) else option.default}."


def _kind(kind: click.ParamType[object]) -> str:
    if isinstance(kind, click.Choice):
        return "|".join(map(str, kind.choices))
    return {"integer range": "N", "integer": "N", "float range": "N", "float": "N"}.get(kind.name, kind.name.upper())


def events_page() -> str:
    """Return docs/events.md: every event with its meaning and remedy, by level."""
    levels = {ERROR: "Errors", WARNING: "Warnings", INFO: "Information"}
    lines = [
        "# Events", "",
        "Made from the table in `pyengine/events.py`: each kind of line in an engine's log, and *what to do about it*.", "",
        "In `STORE/engine.log` the event follows its process:", "",
        "```", "2026-11-24T09:30:00Z supervisor[4711] WORKER_ENDED writer (pid 4712) ended with SIGKILL; starting it again", "```", "",
        "Under systemd each line is a record of the journal, with the fields `EVENT`, `WORKER`, `STORE` and a priority: `journalctl -p "
        "warning\nSTORE=/var/lib/pyengine/demo`. For what lasts, see `pyengine status STORE` and the alerts "
        "([statistics.md](statistics.md)).", ""]
    for level, title in levels.items():
        lines += [f"## {title}", "", *(f"- `{event.name}`: {event.meaning}{f' *{event.action}*' if event.action != NOTHING else ''}"
                                       for event in Event if event.level == level), ""]
    return "\n".join(lines).rstrip() + "\n"


def _items(columns: Iterable[Column]) -> list[str]:
    """Return a list of columns: name, type and meaning."""
    return [f"- `{one.name}` {one.type.replace('<', chr(92) + '<')}: {one.meaning}" for one in columns]


def column_table() -> str:
    from pyengine.spark.schema import COLUMNS, PROPERTY_PREFIX, Column

    default, others = ([one for one in COLUMNS if one.in_default is which] for which in (True, False))
    others.append(Column(f"{PROPERTY_PREFIX}<NAME>", "STRING", "The property of that name."))
    return "\n".join([*_items(default), "", "On request:", "", *_items(others)])


def option_table() -> str:
    from pyengine.spark.options import OPTIONS

    return "\n".join(f"- `{one.key}`{f' (default {text})' if (text := one.default_text or one.show(one.default)) else ''}: {one.meaning}"
                     for one in OPTIONS.values())


def queue_section() -> str:
    """Return the section about views of queues."""
    from pyengine.spark.schema import VIEW_OPTIONS, VIEWS

    names = ", ".join(f"`{name}`" for name in VIEW_OPTIONS)
    lines, seen = [f"A view takes the options {names} and the sizes."], set()
    for view, columns in VIEWS.items():
        known = [f"`{one.name}`" for one in columns if one in seen]
        lines += ["", f"`view={view}`{' has ' + ', '.join(known) + ' as above, and' if known else ''}:", "",
                  *_items(one for one in columns if one not in seen)]
        seen.update(columns)
    return "\n".join(lines)


def stats_table() -> str:
    from pyengine.spark.jobs import FIGURES

    return "\n".join(_items(FIGURES))


def sink_section() -> str:
    """Return the section with the columns and options of the sink."""
    from pyengine.spark.schema import Column
    from pyengine.spark.sink import SINK_COLUMNS, SINK_OPTIONS

    columns = _items(Column(name, " or ".join(types), meaning) for name, (types, meaning) in SINK_COLUMNS.items())
    options = [f"- `{name}`: {meaning}" for name, meaning in SINK_OPTIONS.items()]
    return "\n".join([*columns, "", "Options:", "", *options])


def with_tables(page: str) -> str:
    """Return docs/spark.md with new tables between their marks; needs the extra `spark`."""
    tables = {"columns": column_table(), "options": option_table(), "queues": queue_section(), "stats": stats_table(),
              "sink": sink_section()}
    for name, table in tables.items():
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        page = before + begin + table + "\n" + end + after
    return page


def with_layout(page: str) -> str:
    """Return docs/upgrades.md with the layout of this version, which has the last row of the table."""
    from pyengine.native.control import LAYOUT_VERSION

    page = re.sub(r"(this version's is )\d+", rf"\g<1>{LAYOUT_VERSION}", page)
    row = list(re.finditer(r"^\| \d+\.\d+\.\d+ \| (\d+) \|", page, re.MULTILINE))[-1]
    return page[:row.start(1)] + str(LAYOUT_VERSION) + page[row.end(1):]


PAGES = {"configuration.md": configuration_page, "commands.md": commands_page, "events.md": events_page}


def main() -> None:
    for name, page in PAGES.items():
        (Path(sys.argv[1]) / name).write_text(page(), encoding="utf-8")
    for name, change in (("upgrades.md", with_layout), ("spark.md", with_tables)):
        path = Path(sys.argv[1]) / name
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
