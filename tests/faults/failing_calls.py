"""Builds failing_calls.c, under which chosen system calls fail."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("failing_calls.c")


def preload(library: Path) -> dict[str, str]:
    """Return the environment that loads the library; LD_PRELOAD has its name only, since it ends a path at a space."""
    folder, others = library.resolve().parent, os.environ.get("LD_LIBRARY_PATH")
    return {"LD_PRELOAD": library.name, "LD_LIBRARY_PATH": f"{folder}:{others}" if others else str(folder)}


def build_shim(folder: Path) -> Path:
    """Compile the library; CalledProcessError has the compiler's messages."""
    library = folder / "failing.so"
    command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library
