"""`pyengine config`: shows every setting and its source, reads a broker's file, and changes settings while an engine runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from pyengine.cli import output
from pyengine.cli.output import GivenPath, Reply, StoreArgument, answers, set_option, store_command
from pyengine.errors import ConfigError, EngineError, EngineUnavailableError, NotAStoreError, UsageError, command
from pyengine.formats.paths import PATH_SEPARATOR
from pyengine.formats.small_file import parse_properties, read_small_text
from pyengine.settings import Setting, join_address
from pyengine.storage.config import (
    ENVIRONMENT,
    FIXED_NAMES,
    LOG_PATHS,
    REFUSED_KEYS,
    SET,
    SETTINGS,
    UNUSED_KEYS,
    EngineConfig,
    changing_engine,
    config_path,
    existing_store,
    fold,
    load_config,
    nearest_name,
    read_file,
    set_durably,
    setting_name,
    settings_to_set,
)

broker_conf_option = click.option(
    "--broker-conf", type=click.Path(path_type=Path, dir_okay=False), default=None, metavar="FILE",
    help="Use the settings of this RocketMQ broker's file; --set overrides them.")
_LISTEN_PORT = "10911"  # BrokerConfig's default
TAKEN_TIMEOUT_S = 20.0  # a worker does a round at least every five seconds, unless its disk hangs
POLL_S = 0.01
RESTART = "at the next start: pyengine stop, then start"


class _Actions(click.Group):
    """For one version an action after STORE is taken too, as by StoreArgument."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if len(args) > 1 and args[0] not in self.commands and args[1] in self.commands:
            args = [args[1], args[0], *args[2:]]
        return super().resolve_command(ctx, args)


@click.group(cls=_Actions)
def config() -> None:
    """Show settings, and change them.

    \b
    Example:
      pyengine config explain STORE
    """


@config.command()
@click.argument("store", cls=StoreArgument, type=GivenPath(path_type=Path), metavar="[STORE]", required=False)
@click.argument("names", nargs=-1, metavar="[SETTING]...")
@set_option
@answers
@broker_conf_option
@click.option("--changed", is_flag=True, help="Show only the settings that differ from the default.")
def explain(store: Path | None, names: tuple[str, ...], settings: dict[str, str], broker_conf: Path | None, changed: bool) -> Reply:
    """Show every setting, or those named, with value, default, source, and when a change takes effect.

    Without STORE: a new store's. --broker-conf lists each key of that file, and what becomes of it.

    \b
    Examples:
      pyengine config explain STORE --changed --broker-conf conf/broker.conf
      PYENGINE_FLUSH_DISK_TYPE=SYNC_FLUSH pyengine config explain --set syncFlushTimeout=2s
    """
    if store is not None and _is_setting(store):
        store, names = None, (str(store), *names)
    chosen = [setting_name(name, "config explain") for name in names]
    if store is not None:
        _check_store(store)
    taken, keys = (settings, []) if broker_conf is None else read_broker_conf(broker_conf, store, settings)
    running = None if settings or store is None or broker_conf is not None else _running(store)
    loaded = running or load_config(store, taken)
    rows = [(name, value, default, broker_conf.name if broker_conf is not None and name in taken.keys() - settings.keys() else origin)
            for name, value, default, origin in loaded.explain()
            if (not changed or value != default) and (not chosen or name in chosen)]
    described = [{"name": name, "value": getattr(loaded, name), "default": row.default, "from": origin, "unit": row.unit,
                  "key": row.key or None, "fixed": row.fixed, "live": bool(row.live), "takes_effect": _takes_effect(row),
                  "meaning": row.meaning} for name, _, _, origin in rows for row in [SETTINGS[name]]]
    document = {"store": str(store) if store else None, "mode": loaded.mode, "running": running is not None, "settings": described}
    if broker_conf is not None:
        document["broker_conf"] = keys

    def show() -> None:
        if broker_conf is not None:
            output.write_rows(keys, "key value outcome", f"in {broker_conf.name}")
            print()
        _print_settings(rows, bool(chosen))

    return Reply(document, show)


def _print_settings(rows: Sequence[tuple[str, str, str, str]], one_by_one: bool) -> None:
    """Print (name, value, default, source) of settings."""
    if one_by_one:
        for at, (name, value, default, origin) in enumerate(rows):
            row = SETTINGS[name]
            facts = {"meaning": row.meaning, "value": value or '""', "default": default or '""', "allowed": row.allowed(), "from": origin,
                     "a change takes effect": _takes_effect(row), "RocketMQ's name": row.key or "none"}
            output.write_facts(facts.items(), ("\n" if at else "") + name)
        return
    output.write_table(("setting", "value", "default", "from", "a change takes effect"),
                       [(*row, _takes_effect(SETTINGS[row[0]])) for row in rows])


def _is_setting(word: Path) -> bool:
    """Whether a word in the place of STORE names a setting; ConfigError for one that is nearly the name of a setting, and no path."""
    text = str(word)
    if word.exists() or "/" in text:
        return False
    try:
        setting_name(text, "config explain")
    except ConfigError:
        if nearest_name(fold(text), cutoff=0.8) or text in REFUSED_KEYS | UNUSED_KEYS:
            raise
        return False
    return True


def _check_store(store: Path) -> None:
    """Print a note if `store` holds no store yet; NotAStoreError if it is a file."""
    try:
        existing_store(store)
    except NotAStoreError:
        if store.exists() and not store.is_dir():
            raise
        output.note(f"{store} holds no store: these are the settings that a new store there gets")


@config.command("set")
@store_command
@click.argument("pairs", nargs=-1, metavar="KEY=VALUE...")
def set_command(store: Path, settings: dict[str, str], pairs: Sequence[str]) -> Reply:
    """Change settings of a store, durably in STORE/config/engine.toml, and of its running engine.

    A wrong name or value changes nothing. It names the settings that need a restart.

    \b
    Example:
      pyengine config set STORE file_reserved_time_hours=24 log_retention_bytes=200G
    """
    values = settings_to_set([*pairs, *(f"{key}={value}" for key, value in settings.items())])
    if not values:
        raise UsageError("nothing to set: give KEY=VALUE, as in file_reserved_time_hours=24")
    running, present = _running(existing_store(store)), read_file(config_path(store))
    named = [name for name in LOG_PATHS if name in values and values[name] != present.get(name, "")]
    if running is not None and named:  # readers would use the new folders at once
        raise UsageError(f"{' and '.join(named)} can be set only while no engine runs: {command('stop', store)}, set it, then start")
    set_durably(store, values)
    if running is not None:
        _change_engine(store, {name: SETTINGS[name].show(value) for name, value in values.items() if SETTINGS[name].live})
    rows = [_changed(name, SETTINGS[name].show(value), running) for name, value in values.items()]
    return Reply({"store": str(store), "running": running is not None, "settings": rows},
                 lambda: output.write_rows(rows, "name value takes_effect note"))


def _takes_effect(row: Setting) -> str:
    if row.fixed:
        return "never"
    return row.live or "at a restart"


def _changed(name: str, value: str, running: EngineConfig | None) -> dict[str, Any]:
    origin = running.origins.get(name) if running else None
    note = f"the next start with the same {'environment' if origin == ENVIRONMENT else 'command line'} overrides the file" \
        if origin in (SET, ENVIRONMENT) else ""
    if running is None:
        takes_effect = "at the next start"
    else:
        takes_effect = SETTINGS[name].live or RESTART
    return {"name": name, "value": value, "live": bool(running and SETTINGS[name].live), "takes_effect": takes_effect, "note": note}


def _running(store: Path) -> EngineConfig | None:
    """Return the settings of the engine that runs on `store`; None if there is none or its memory is not visible here."""
    from pyengine.ipc.control_block import EngineMemory, read_run_settings
    from pyengine.ipc.store_lock import living_kinds

    if not config_path(store).exists() or not living_kinds(store):
        return None
    try:
        with EngineMemory.of(store) as memory:
            return read_run_settings(memory.folder)
    except EngineUnavailableError:
        return None


def _change_engine(store: Path, live: dict[str, str]) -> None:
    """Tell the engine to use the settings `live`, and wait until each worker does."""
    from pyengine.ipc.session_client import ask_for_settings

    with changing_engine(store):
        number = ask_for_settings(store, live)["number"]
        slow = _workers_behind(store, number)
    if slow:
        raise EngineError(f"{config_path(store)} is changed and the engine was told, but the change is not used yet by: "
                          f"{', '.join(slow)}; `pyengine status` says why they are blocked")


def _workers_behind(store: Path, number: int) -> list[str]:
    """Return the workers that do not use settings number `number` in time; [] if all do."""
    from pyengine.ipc.control_block import EngineMemory
    from pyengine.ipc.shared_objects import KIND_NAMES
    from pyengine.ipc.store_lock import living_kinds
    from pyengine.native import control as native

    takers = {native.FLUSHER, native.COMMITTER, native.CHECKPOINTER, native.CLEANER, native.SCHEDULER}
    deadline_s = time.monotonic() + TAKEN_TIMEOUT_S
    with EngineMemory.of(store) as memory:
        while True:
            slow = [KIND_NAMES[kind] for kind in sorted(takers.intersection(living_kinds(store)))
                    if native.load(memory.control.workers[kind], "settings_seq") < number]
            if not slow or memory.retired or time.monotonic() >= deadline_s:
                return slow
            time.sleep(POLL_S)


# ---- a broker's properties file ---------------------------------------------------

TAKEN = "taken"
_GATEWAYS_OWN = {"brokerIP1": "gateway_advertised_host", "listenPort": "gateway_broker_port"}


def with_broker_conf(path: Path | None, root: Path, given: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the settings to start an engine with, from --set and a broker's file if given, and notes for the user."""
    if path is None:
        return given, []
    settings, rows = read_broker_conf(path, root, given)
    return settings, [f"{path.name}: {row['key']} = {row['value']}: {row['outcome']}" for row in rows if row["is_note"]]


def read_broker_conf(path: Path, root: Path | None, given: Mapping[str, str]) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the settings of a broker's properties file for the store at `root`, with `given` (--set), which wins, and a row for each key.

    `outcome` says how pyengine uses the key, `is_note` that an operator should read it.
    brokerIP1 and listenPort set store_host, and the gateway's address and port. A size that differs from the store's files is
    left out and named. ConfigError for a file that cannot be read and for a wrong value.
    """
    try:
        properties = parse_properties(read_small_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the broker's file {path}: {error}") from error
    asked = {setting_name(key, "--set"): value for key, value in given.items()}
    base = load_config(root, {})
    settings, rows = dict(given), list[dict[str, Any]]()
    host, said = _store_host(properties)

    def take(key: str, name: str, text: str) -> tuple[str, bool]:
        """Use one setting; return the outcome, and whether it is worth a note."""
        wanted = SETTINGS[name].read(text, path.name)
        there = getattr(base, name)
        if name in asked:
            return f"not taken: --set says {asked[name]}", True
        if name in FIXED_NAMES and wanted != there and not _fits(root, name, text):
            return f"differs: the store's files have {there}, which stays", True
        settings[name] = text
        if name in FIXED_NAMES and key.startswith("maped"):
            return f"{TAKEN} as {name}; RocketMQ 4.9 ignores this key: it reads {SETTINGS[name].key}", True
        before = f"; {base.origins[name]} says {there}" if name in base.origins and wanted != there else ""
        return f"{TAKEN} as {name}{before}", bool(before)

    for key, value in properties.items():
        if key in _GATEWAYS_OWN:  # a broker has one address, in its routes and in its messages
            found = [take(key, "store_host", host) if host is not None else (said, True), take(key, _GATEWAYS_OWN[key], value.strip())]
        else:
            try:
                name = setting_name(key, path.name)
            except ConfigError:
                found = [_without_setting(key, value, root)]
            else:
                here = _in_store(root, properties, value) if name in LOG_PATHS else value
                found = [take(key, name, here)] + [(f"in {root}: {here}", True)] * (here != value)
        rows.append({"key": key, "value": value, "outcome": "; ".join(outcome for outcome, _ in found),
                     "is_note": any(note for _, note in found)})
    return settings, rows


def _fits(root: Path | None, name: str, text: str) -> bool:
    """Return whether the store's files may have this size: they have no other yet."""
    try:
        load_config(root, {name: text})
    except ConfigError:
        return False
    return True


def _in_store(root: Path | None, properties: Mapping[str, str], folders: str) -> str:
    """Return folders of a broker's log for the store at `root`: those in another storePathRootDir are that store's."""
    there = properties.get("storePathRootDir", "")
    if root is None or not there or Path(there).resolve() == root.resolve():
        return folders
    pieces = (Path(piece.strip()) for piece in folders.split(PATH_SEPARATOR) if piece.strip())
    return PATH_SEPARATOR.join(str(piece.relative_to(there) if piece.is_relative_to(there) else piece) for piece in pieces)


def _store_host(properties: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the store host that a broker with this file would write into messages, and why it is unknown if it is."""
    address = properties.get("brokerIP1", "").strip()
    if not address:
        return None, "not taken: without brokerIP1 a broker writes this host's own address; give it by --set store_host=ADDRESS:PORT"
    return join_address(address, properties.get("listenPort", _LISTEN_PORT)), ""


def _without_setting(key: str, value: str, root: Path | None) -> tuple[str, bool]:
    if key == "storePathRootDir" and root is not None:
        is_same = Path(value).resolve() == root.resolve()
        return "this store" if is_same else f"differs: the command names {root}", not is_same
    if key in REFUSED_KEYS:
        held, why = REFUSED_KEYS[key]
        return f"not taken: {why}", value.strip().lower() != held
    return f"without effect: {UNUSED_KEYS[key]}" if key in UNUSED_KEYS else "no setting of a store here", False
