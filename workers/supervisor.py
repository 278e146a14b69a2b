"""Supervisor: owns the store, recovers it, starts and watches the workers, opens sessions, stops the engine.

Time bound: it restarts a dead worker after `restart_pause_s`. If it dies, the workers continue; the next supervisor takes
its lock byte and adopts them.
"""

from __future__ import annotations

import sys

from pyengine.engine.supervisor import main

if __name__ == "__main__":
    sys.exit(main())
