"""Run a program and keep what it prints, with the time of each line, for a picture of a terminal.

usage: python docs/pictures/record.py quickstart|top

quickstart: scripts/quickstart with 20 MiB. top: the last of four refreshes of `pyengine top`, beside a program that puts. Folders of
this machine are shortened: the store's to its name, that of Python's library to its last two parts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

import pyengine  # noqa: E402

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
BATCHES = {"clicks": 160, "orders": 40, "bills": 10}


def run(command: list[str | Path], folder: str) -> list[tuple[float, str]]:
    """Seconds since the first line, and the line."""
    lines: list[tuple[float, str]] = []
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "108"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as process:
        begun_s = 0.0
        for line in process.stdout or ():
            begun_s = begun_s or time.monotonic()
            text = line.rstrip().replace(f"{folder}/", "").replace(str(LIBRARY), "/".join(LIBRARY.parts[-2:]))
            lines.append((round(time.monotonic() - begun_s, 2), text))
    if process.returncode:
        sys.exit(f"{command[0]} ended with {process.returncode}")
    return lines


def quickstart(folder: str) -> list[tuple[float, str]]:
    return run([ROOT / "scripts" / "quickstart", "--megabytes", "20", "--store", f"{folder}/my-store"], folder)


def top(folder: str) -> list[tuple[float, str]]:
    store, done = f"{folder}/my-store", threading.Event()

    def put() -> None:
        with pyengine.connect(store) as producer:
            while not done.wait(0.02):
                for topic, count in BATCHES.items():
                    producer.put_many(topic, [os.urandom(500)] * count)

    with pyengine.Engine(store):
        putting = threading.Thread(target=put)
        putting.start()
        try:
            lines = run([sys.executable, "-P", "-m", "pyengine", "top", store, "--count", "4"], folder)
        finally:
            done.set()
            putting.join()
    last = max(number for number, (_, line) in enumerate(lines) if line.startswith("store "))
    return [(0.0, line) for _, line in lines[last:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quickstart", "top"])
    what = parser.parse_args().what
    with tempfile.TemporaryDirectory() as folder:
        lines = {"quickstart": quickstart, "top": top}[what](folder)
    text = "[\n" + ",\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n]\n"
    (HERE / f"{what}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
