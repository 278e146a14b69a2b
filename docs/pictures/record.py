"""Run scripts/quickstart and keep what it prints, with the time of each line, for the picture quickstart.

usage: python docs/pictures/record.py [--megabytes N]

Folders of this machine are shortened: the store's to its name, that of Python's library to its last two parts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEPT = HERE / "quickstart.json"


def run(megabytes: int) -> list[tuple[float, str]]:
    """Seconds since the first line, and the line."""
    library = Path(sysconfig.get_paths()["stdlib"])
    lines: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        command = [HERE.parent.parent / "scripts" / "quickstart", "--megabytes", str(megabytes), "--store", f"{folder}/my-store"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                              env=os.environ | {"PYTHONUNBUFFERED": "1"}) as process:
            begun_s = 0.0
            for line in process.stdout or ():
                begun_s = begun_s or time.monotonic()
                text = line.rstrip().replace(f"{folder}/", "").replace(str(library), "/".join(library.parts[-2:]))
                lines.append((round(time.monotonic() - begun_s, 2), text))
    if process.returncode:
        sys.exit(f"scripts/quickstart ended with {process.returncode}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=20)
    lines = run(parser.parse_args().megabytes)
    KEPT.write_text("[\n" + ",\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
