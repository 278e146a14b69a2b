"""`pyengine config explain`: every setting, its value, and where the value came from."""

from __future__ import annotations

from pathlib import Path

import click

from pyengine.cli import output
from pyengine.cli.options import json_option, set_option
from pyengine.storage.config import SETTINGS, load_config


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
@click.option("--changed", is_flag=True, help="Only the settings that differ from the default.")
def explain(store: Path | None, settings: dict[str, str], as_json: bool, changed: bool) -> None:
    """Show every setting: value, default, and where the value came from.

    Sources, the later wins: STORE/config/engine.toml, environment variables
    PYENGINE_NAME, --set. File sizes of a store without engine.toml are worked out
    from its files. Without STORE: the settings that a new store would get.

    \b
    Examples:
      pyengine config explain STORE --changed
      PYENGINE_FLUSH_DISK_TYPE=SYNC_FLUSH pyengine config explain --set syncFlushTimeout=2s
    """
    loaded = load_config(store, settings)
    rows = [row for row in loaded.explain() if not changed or row[1] != row[2]]
    if as_json:
        output.write_json({"store": str(store) if store else None, "mode": loaded.mode, "settings": [
            {"name": name, "value": getattr(loaded, name), "default": SETTINGS[name].default, "from": origin,
             "unit": SETTINGS[name].unit, "key": SETTINGS[name].key or None, "fixed": SETTINGS[name].fixed,
             "without_effect_because": SETTINGS[name].inert or None, "meaning": SETTINGS[name].meaning}
            for name, _, _, origin in rows]})
        return
    output.write_table(("setting", "value", "default", "from"), rows)
