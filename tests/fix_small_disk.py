"""File systems that are soon full. Needs root (marker `root`)."""

from __future__ import annotations

import errno
import os
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


@pytest.fixture
def make_disk(tmp_path):
    """make_disk("btrfs") -> folder with an empty file system of that kind, which is soon full: btrfs, xfs (a loop device each),
    or "overlay", which is one over a btrfs; unmounted at the end."""
    disks: list[Path] = []

    def do(*command: object) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            need = str(command[0]).removeprefix("mkfs.")  # a need of tests/needs.py, or none
            pytest.skip(f"{need}: {command[0]} not found on PATH")
        if done.returncode:
            pytest.skip(f"{command[0]} refused: {done.stderr.strip()}")

    def mount(folder: Path, *options: object) -> Path:
        folder.mkdir()
        do("mount", *options, folder)
        disks.append(folder)
        return folder

    def make(kind: str) -> Path:
        folder = tmp_path / f"{kind}-{len(disks)}"
        if kind == "overlay":
            below = make("btrfs")
            parts = [below / name for name in ("lower", "upper", "work")]
            for part in parts:
                part.mkdir()
            lower, upper, work = parts
            return mount(folder, "-t", "overlay", "-o", f"lowerdir={lower},upperdir={upper},workdir={work}", "overlay")
        image = folder.with_suffix(".image")
        do("truncate", "-s", {"btrfs": "256M", "xfs": "320M"}[kind], image)
        do(f"mkfs.{kind}", "-q", image)
        return mount(folder, "-o", "loop", image)

    yield make
    for folder in reversed(disks):
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(file: Path) -> None:
    """Take all room of a file system, and what syncing gives back of it."""
    piece = os.urandom(1 << 20)
    with open(file, "ab", buffering=0) as opened:
        for _ in range(3):
            size = len(piece)
            while size:
                try:
                    if opened.write(piece[:size]) < size:
                        size //= 2
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2
            os.sync()
