"""Blocks are allocated without a change of content and length, also on a file system that has no call for it."""

from __future__ import annotations

import os
import subprocess

import pytest

from pyengine._native import ffi, lib
from pyengine.errors import DiskError
from pyengine.native.flush import allocate

SIZE = 1 << 20


@pytest.fixture(params=[pytest.param("ramfs", marks=pytest.mark.root), "here"])
def folder(request, tmp_path):
    if request.param == "here":
        yield tmp_path
        return
    done = subprocess.run(["mount", "-t", "ramfs", "ramfs", tmp_path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount refused: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_bytes_and_length_stay(folder):
    content = bytearray(SIZE)
    for at in (0, 4095, 4096, 70_000, SIZE - 1):
        content[at] = 7
    file = folder / "file"
    file.write_bytes(content)
    descriptor = os.open(file, os.O_RDWR)
    try:
        allocate(descriptor, 0, SIZE)
        allocate(descriptor, 100, SIZE - 100)
        assert file.read_bytes() == content
        os.ftruncate(descriptor, 5000)
        try:
            allocate(descriptor, 4096, 8192)
        except DiskError:  # without fallocate it would have to write there
            pass
        assert os.fstat(descriptor).st_size == 5000 and file.read_bytes() == content[:5000]
    finally:
        os.close(descriptor)


def test_the_last_window_ends_with_the_file(tmp_path):
    """A queue file of RocketMQ's length is no whole number of windows."""
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(descriptor, 3 * 4096)
        allocated = ffi.new("int64_t *")
        assert lib.ms_flush_allocate_windows(descriptor, allocated, 3 * 4096, SIZE, 0, 20) == 0
        assert allocated[0] == 3 * 4096
        assert os.fstat(descriptor).st_blocks * 512 < SIZE, "no blocks behind the end"
    finally:
        os.close(descriptor)


def test_a_hole_gets_blocks(folder):
    file = folder / "file"
    with open(file, "wb") as opened:
        os.ftruncate(opened.fileno(), SIZE)
        assert os.fstat(opened.fileno()).st_blocks == 0
    descriptor = os.open(file, os.O_RDWR)
    try:
        allocate(descriptor, 0, SIZE // 2)
        assert SIZE // 2 <= os.fstat(descriptor).st_blocks * 512 < SIZE or folder_has_no_blocks(folder)
    finally:
        os.close(descriptor)


def folder_has_no_blocks(folder) -> bool:
    return os.statvfs(folder).f_blocks == 0
