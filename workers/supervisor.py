"""Supervisor: owns the store, recovers it, starts and watches the workers, opens sessions, stops in order.

Why: a store has one owner, and a worker that dies is started again in its place. Time bound: a dead worker is
replaced after `restart_pause_s`. Its death: living workers go on; its successor takes its lock byte and adopts them.
"""

from __future__ import annotations

import sys

from pyengine.engine.supervisor import main

if __name__ == "__main__":
    sys.exit(main())
