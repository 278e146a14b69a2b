"""File systems that are soon full. Needs root (marker `root`)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def resize(disk: Path, size: str) -> None:
    """Another size for a disk of `make_small_disk`; it must hold what is on it."""
    done = subprocess.run(["mount", "-o", f"remount,size={size}", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"remount refused: {done.stderr.strip()}")


@pytest.fixture
def make_small_disk(tmp_path):
    """make_small_disk("512k") -> folder with a file system of that size; unmounted at the end."""
    disks: list[Path] = []

    def make(size: str) -> Path:
        folder = tmp_path / f"disk-{len(disks)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mount refused: {done.stderr.strip()}")
        disks.append(folder)
        return folder

    yield make
    for folder in disks:
        subprocess.run(["umount", "--lazy", folder], check=True)
