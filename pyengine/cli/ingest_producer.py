"""One producer process of `pyengine ingest`: `python -m pyengine.cli.ingest_producer`.

stdin: the job, one JSON document. stdout: JSON lines, the tally at most every
REPORT_INTERVAL_S, then `{"done": true}` or `{"error": ..., "exit_code": ...}`. It ends
with its parent: a report that nobody reads is a broken pipe. SIGTERM ends it after the
batch that is under way.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import asdict
from typing import Any

from pyengine.cli.ingest_work import Job, Tally, produce
from pyengine.cli.interrupt import StopAtBatchEnd
from pyengine.errors import EngineError, ExitCode

REPORT_INTERVAL_S = 0.1


def main() -> int:
    job = Job.from_json(sys.stdin.read())
    last = 0.0
    tally = Tally()

    def report(now: Tally) -> None:
        nonlocal last, tally
        tally = now
        stop.check()
        if time.monotonic() - last >= REPORT_INTERVAL_S:
            last = time.monotonic()
            _say(asdict(now))

    try:
        with StopAtBatchEnd(signal.SIGTERM) as stop:
            tally = produce(job, report)
        _say(asdict(tally) | {"done": True})
        return ExitCode.OK
    except EngineError as error:
        _say(asdict(tally) | {"error": str(error), "exit_code": int(error.exit_code)})
        return error.exit_code
    except (KeyboardInterrupt, BrokenPipeError):
        return ExitCode.INTERRUPTED


def _say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
