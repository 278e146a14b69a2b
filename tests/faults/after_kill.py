"""What is done to a store whose engine was killed, before the power is cut: each is recorded like the engine itself.

    recover   `pyengine recover`, with the memory that the engine left
    rebuild   `pyengine rebuild`
    salvage   `pyengine salvage` into a new store, which is the one that is judged
    cut       a recovery, then a cut of the log as a slave's start makes it whose master has another end, and its recovery
    read      a reader at level `flushed`

When it has returned, how far the log reaches is written down as a promise: what is durable by then must survive.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

THEN = ("recover", "rebuild", "salvage", "cut", "read")

# argv: store, acks, rows. Cuts at the record of an acknowledged message in the last third of the log.
CUT = """
import json, os, sys
from pyengine.ipc.crashed_engine_memory import recover_offline
from pyengine.storage.config import load_config
from pyengine.storage.message_store import MessageStore
from pyengine.storage.checkpoint import Cut, CUT
from pyengine.storage.recovery.recover import recover
root, acks = sys.argv[1], os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND)
config = load_config(root)
end = recover_offline(root, config).end_offset
os.write(acks, json.dumps({"flushed": end}).encode() + b"\\n")
at = next(offset for offset in json.loads(sys.argv[3]) if offset >= end * 2 // 3)
os.write(acks, json.dumps({"cutting": at}).encode() + b"\\n")
CUT.write(root, Cut(at, end, "another end"))
recover(MessageStore(root, config.geometry), options=config)
os.write(acks, json.dumps({"cut": at}).encode() + b"\\n")
"""
READ = """
import json, sys
import pyengine
with pyengine.open_store(sys.argv[1]) as store:
    print(json.dumps({"end_offset": store.max_physical_offset("flushed")}))
"""


def do(then: str, store: Path, acks: Path, environ: dict[str, str], tell: Callable[[bytes], object],
       destination: Path | None = None) -> None:
    """Do it with `environ`; what it has made durable is promised at its end, to `tell`.

    A `salvage` makes a store at `destination`: the promise is of that one.
    """
    rows = [row for row in map(json.loads, acks.read_bytes().splitlines())
            if "body_sha256" in row and row["physical_offset"] is not None]
    module = [sys.executable, "-P", "-m", "pyengine", then, str(store)]
    commands = {
        "recover": [*module, "--json"], "rebuild": [*module, "--json"], "salvage": [*module, str(destination), "--json"],
        "cut": [sys.executable, "-P", "-c", CUT, str(store), str(acks), json.dumps(sorted(row["physical_offset"] for row in rows))],
        "read": [sys.executable, "-P", "-c", READ, str(store)],
    }
    done = subprocess.run(commands[then], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{then}: {done.returncode} {done.stdout} {done.stderr}"
    if then == "cut":
        return  # it has told itself, as it went
    end = json.loads(done.stdout)["end_offset"]
    kept = []
    if then == "salvage":  # records have new places there
        kept = [row | {"physical_offset": None} for row in rows]
    said = [*kept, {"read_to" if then == "read" else "flushed": end}]
    tell("".join(json.dumps(line) + "\n" for line in said).encode())
