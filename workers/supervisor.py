"""Supervisor: owns the store, recovers it, starts and watches the workers, opens sessions, stops the engine.

Time bound: it restarts a dead worker after `restart_pause_s`.
"""

from __future__ import annotations

from pathlib import Path

from pyengine.engine import supervisor
from pyengine.engine_config import EngineConfig


def find_master(root: Path, config: EngineConfig) -> str:
    """Ask the name servers of a slave where its master is."""
    from pyengine.gateway.registration import find_master as ask  # which few starts need

    return ask(root, config)


def main() -> int:
    """Run the supervisor with the arguments of this process; its exit code."""
    return supervisor.main(find_master=find_master)


if __name__ == "__main__":
    raise SystemExit(main())
