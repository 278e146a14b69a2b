"""The settings that an engine was brought up with: the object `settings` beside its control block.

Its owner writes them once. They hold for its workers until the engine ends, whatever command
line, environment and engine.toml say by then: a supervisor that adopts living workers compares
what it is asked for with them, and starts the missing workers with them.
"""

from __future__ import annotations

import json

from pyengine.config import DEFAULT, SETTINGS, EngineConfig
from pyengine.errors import ConfigError, EngineUnavailableError
from pyengine.formats.small_file import PARSE_ERRORS
from pyengine.ipc.shared_objects import SETTINGS as OBJECT
from pyengine.ipc.shared_objects import SharedFolder


def write_run_settings(folder: SharedFolder, config: EngineConfig) -> None:
    """Note every setting with its origin, before the control block is published. For the store's owner."""
    document = {name: [SETTINGS[name].show(getattr(config, name)), config.origins.get(name, DEFAULT)] for name in SETTINGS}
    text = json.dumps(document).encode()
    with folder.create(OBJECT, len(text)) as shared:
        shared.memory[:] = text


def read_run_settings(folder: SharedFolder) -> EngineConfig:
    """What the engine in `folder` runs with; EngineUnavailableError where that cannot be told."""
    with folder.attach(OBJECT, writable=False) as shared:
        try:
            document = json.loads(shared.memory[:])
            return EngineConfig(**{name: value for name, (value, _) in document.items()},
                                origins={name: str(origin) for name, (_, origin) in document.items()})
        except (ConfigError, *PARSE_ERRORS) as error:
            raise EngineUnavailableError(f"{folder.path / OBJECT} is damaged ({error}): stop the engine, then start it") from None


def asked_otherwise(asked: EngineConfig, running: EngineConfig) -> list[str]:
    """A clause for each setting that --set, the environment or engine.toml gives with another value than the running one."""
    return [f"{name} = {row.show(getattr(asked, name))} ({asked.origins[name]}) is asked for, "
            f"{row.show(getattr(running, name))} runs"
            for name, row in SETTINGS.items()
            if asked.origins.get(name, DEFAULT) != DEFAULT and not row.inert
            and getattr(asked, name) != getattr(running, name)]


def overrides_of(running: EngineConfig, asked: EngineConfig | None) -> dict[str, str]:
    """What a worker must be given by --set to run with `running` where it would find `asked` by itself (None: unknown)."""
    return running.overrides() | {name: row.show(getattr(running, name)) for name, row in SETTINGS.items()
                                  if asked is not None and getattr(asked, name) != getattr(running, name)}
