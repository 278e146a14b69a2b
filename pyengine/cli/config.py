"""`pyengine config explain`: every setting, its value, and where the value came from; and what a broker's file gives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from pyengine.cli import output
from pyengine.cli.options import json_option, set_option
from pyengine.errors import ConfigError
from pyengine.formats.small_file import read_small_text
from pyengine.storage.config import FIXED_NAMES, REFUSED_KEYS, SETTINGS, load_config, setting_name

broker_conf_option = click.option(
    "--broker-conf", type=click.Path(path_type=Path, dir_okay=False), default=None, metavar="FILE",
    help="Take the settings of this properties file of a RocketMQ broker, as far as pyengine has them; --set comes before them.")
_LISTEN_PORT = "10911"  # BrokerConfig's default


@click.group()
def config() -> None:
    """Look at settings.

    \b
    Example:
      pyengine config explain STORE
    """


@config.command()
@click.argument("store", type=click.Path(path_type=Path), metavar="[STORE]", required=False)
@set_option
@json_option
@broker_conf_option
@click.option("--changed", is_flag=True, help="Only the settings that differ from the default.")
def explain(store: Path | None, settings: dict[str, str], as_json: bool, broker_conf: Path | None, changed: bool) -> None:
    """Show every setting: value, default, and where the value came from.

    Sources, the later wins: STORE/config/engine.toml, environment variables
    PYENGINE_NAME, --set. File sizes of a store without engine.toml are worked out
    from its files. Without STORE: the settings that a new store would get.
    --broker-conf also lists each key of that file: what is taken, what differs from
    this store, and what has no effect here. `start --broker-conf` takes the same.

    \b
    Examples:
      pyengine config explain STORE --changed
      pyengine config explain STORE --changed --broker-conf conf/broker.conf
      PYENGINE_FLUSH_DISK_TYPE=SYNC_FLUSH pyengine config explain --set syncFlushTimeout=2s
    """
    told = None if broker_conf is None else read_broker_conf(broker_conf, store, settings)
    loaded = load_config(store, settings if told is None else told.settings)
    rows = [row for row in loaded.explain() if not changed or row[1] != row[2]]
    if as_json:
        output.write_json({"store": str(store) if store else None, "mode": loaded.mode, "settings": [
            {"name": name, "value": getattr(loaded, name), "default": SETTINGS[name].default, "from": origin,
             "unit": SETTINGS[name].unit, "key": SETTINGS[name].key or None, "fixed": SETTINGS[name].fixed,
             "without_effect_because": SETTINGS[name].inert or None, "meaning": SETTINGS[name].meaning}
            for name, _, _, origin in rows]} | ({} if told is None else {"broker_conf": [asdict(row) for row in told.rows]}))
        return
    if told is not None:
        output.write_table((f"in {told.name}", "value", "here"), [(row.key, row.value, row.outcome) for row in told.rows])
        print()
    output.write_table(("setting", "value", "default", "from"), rows)


# ---- a broker's properties file ---------------------------------------------------

TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class BrokerRow:
    """One key of a broker's file; `outcome` says what pyengine makes of it, `is_note` that an operator should read that."""

    key: str
    value: str
    outcome: str
    is_note: bool = False


@dataclass(frozen=True, slots=True)
class BrokerConf:
    """What a broker's file gives: settings for load_config, those of --set included, and a row for each key."""

    name: str
    settings: dict[str, str]
    rows: list[BrokerRow]

    @property
    def notes(self) -> list[str]:
        """Sentences about what is not simply taken."""
        return [f"{self.name}: {row.key} = {row.value}: {row.outcome}" for row in self.rows if row.is_note]


def read_broker_conf(path: Path, root: Path | None, given: Mapping[str, str]) -> BrokerConf:
    """The settings of a broker's properties file for the store at `root`; `given` (--set) comes before them.

    brokerIP1 and listenPort make store_host. A size that is not that of the store's files is left out, and named.
    ConfigError for a file that cannot be read and for a value that is not allowed.
    """
    try:
        properties = parse_properties(read_small_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the broker's file {path}: {error}") from error
    asked = {setting_name(key, "--set"): value for key, value in given.items()}
    base = load_config(root, {})
    settings, rows = dict(given), []
    host, said = _store_host(properties)
    for key, value in properties.items():
        if key in ("brokerIP1", "listenPort"):
            name, text = "store_host", host
            if host is None:
                rows.append(BrokerRow(key, value, said, is_note=True))
                continue
        else:
            try:
                name, text = setting_name(key, path.name), value
            except ConfigError:
                rows.append(_without_setting(key, value, root))
                continue
        assert text is not None
        wanted = SETTINGS[name].read(text, path.name)
        there = getattr(base, name)
        if name in asked:
            rows.append(BrokerRow(key, value, f"not taken: --set says {asked[name]}", is_note=True))
        elif name in FIXED_NAMES and base.origins.get(name) is not None and wanted != there:
            rows.append(BrokerRow(key, value, f"differs: the store's files have {there}, which stays", is_note=True))
        else:
            settings[name] = text
            before = f"; {base.origins[name]} says {there}" if name in base.origins and wanted != there else ""
            effect = f", without effect: {SETTINGS[name].inert}" if SETTINGS[name].inert else ""
            rows.append(BrokerRow(key, value, f"{TAKEN} as {name}{effect}{before}", is_note=bool(before)))
    return BrokerConf(path.name, settings, rows)


def _store_host(properties: Mapping[str, str]) -> tuple[str | None, str]:
    """The store host that a broker of this file would write into messages, or why it is not known."""
    address = properties.get("brokerIP1", "").strip()
    if not address:
        return None, "not taken: without brokerIP1 a broker writes this host's own address; give it by --set store_host=ADDRESS:PORT"
    port = properties.get("listenPort", _LISTEN_PORT)
    return (f"[{address}]:{port}" if ":" in address else f"{address}:{port}"), ""


def _without_setting(key: str, value: str, root: Path | None) -> BrokerRow:
    if key == "storePathRootDir" and root is not None:
        is_same = Path(value).resolve() == root.resolve()
        return BrokerRow(key, value, "this store" if is_same else f"differs: the command names {root}", is_note=not is_same)
    if key in REFUSED_KEYS:
        return BrokerRow(key, value, f"not taken: {REFUSED_KEYS[key]}", is_note=value.strip().lower() != "false")
    return BrokerRow(key, value, "no setting of a store here")


def parse_properties(text: str) -> dict[str, str]:
    """Java's properties format: comments by # or !, keys up to =, : or blanks, lines joined by \\, and escapes."""
    found: dict[str, str] = {}
    lines = iter(text.splitlines())
    for line in lines:
        line = line.lstrip()
        if not line or line[0] in "#!":
            continue
        while len(line) - len(line.rstrip("\\")) & 1:
            line = line[:-1] + next(lines, "").lstrip()
        key, value = _PROPERTY.fullmatch(line).groups()  # type: ignore[union-attr]  # it matches every line
        found[_unescaped(key)] = _unescaped(value).rstrip()
    return found


_PROPERTY = re.compile(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*(.*)", re.S)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.S)
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def _unescaped(text: str) -> str:
    def one(found: re.Match[str]) -> str:
        mark = found[1]
        return chr(int(mark[1:], 16)) if len(mark) == 5 else _ESCAPES.get(mark, mark)

    return _ESCAPE.sub(one, text)
