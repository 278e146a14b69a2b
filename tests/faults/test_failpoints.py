"""The list of failpoints is the code's: each name in one place, and each place in the list. Arming one says what it cannot."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from crash.board import Board
from crash.steps import EVERY_MODE, FAILPOINTS
from pyengine.errors import UsageError
from waiting import scaled_timeout_s

ROOT = Path(__file__).parents[2]
REACHED = re.compile(r'^\s*(?:MS_FAILPOINT|failpoint)\("([^"]*)"\)', re.MULTILINE)
SOURCES = sorted([*(ROOT / "csrc").glob("*.[ch]"), *(ROOT / "pyengine").rglob("*.py"), *(ROOT / "workers").glob("*.py")])


def places() -> Counter[tuple[str, str]]:
    """(name, file) of every failpoint in the code."""
    return Counter((name, str(path.relative_to(ROOT))) for path in SOURCES for name in REACHED.findall(path.read_text()))


def test_each_failpoint_is_in_one_place_and_each_place_is_in_the_list():
    assert places() == Counter((point.name, point.where) for point in FAILPOINTS.values())


def test_each_failpoint_in_the_list_has_a_valid_name_modes_predecessor_and_gap():
    for point in FAILPOINTS.values():
        assert point.modes and set(point.modes.split()) <= set(EVERY_MODE.split())
        assert not point.after or point.after in FAILPOINTS
        assert len(point.name) < 64 and point.gap


@pytest.mark.parametrize("text, sentence", [
    ("new_file_linked:0:kill", "passings count from 1"),
    ("new_file_linked:1:hurt", "kill or stop"),
    ("new_file_linked", "write name:nth:kill"),
    ("/no/such/file", "write name:nth:kill"),
    ("/dev/null", "write name:nth:kill"),
])
def test_a_failpoint_that_cannot_be_armed_is_an_error(text, sentence):
    done = subprocess.run([sys.executable, "-P", "-m", "pyengine.native.failpoints"], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYENGINE_FAILPOINT": text, "PYTHONPATH": str(ROOT)}, timeout=scaled_timeout_s(60))
    assert done.returncode == 1 and sentence in done.stderr


def reach(name: str, times: int, armed: str) -> int:
    """How a process ends that reaches the step so often."""
    program = f"from pyengine.native.failpoints import failpoint\nfor _ in range({times}): failpoint({name!r})"
    return subprocess.run([sys.executable, "-P", "-c", program], timeout=scaled_timeout_s(60),
                          env=os.environ | {"PYENGINE_FAILPOINT": armed, "PYTHONPATH": str(ROOT)}).returncode


def test_the_nth_passing_strikes_and_none_before():
    assert reach("new_file_linked", 3, "new_file_linked:3:kill") == -signal.SIGKILL
    assert reach("new_file_linked", 2, "new_file_linked:3:kill") == 0
    assert reach("new_file_linked", 3, "new_file_linked@allocator:1:kill") == 0
    assert reach("new_file_synced", 3, "new_file_linked:1:kill") == 0


def test_a_shared_board_strikes_one_process_once(tmp_path):
    board = Board(tmp_path / "board")
    board.arm("new_file_linked", nth=3)
    assert [reach("new_file_linked", 1, str(board.path)) for _ in range(5)] == [0, 0, -signal.SIGKILL, 0, 0]
    assert board.struck_pid
    board.arm("new_file_synced")
    assert not board.struck_pid
    with pytest.raises(UsageError):
        board.arm("new_file_synced", nth=0)


@pytest.mark.parametrize("content", [b"somebody's\n", b"x" * 4096, b"x" * 9000])
def test_a_file_with_something_else_in_it_stays_as_it_is(tmp_path, content):
    path = tmp_path / "theirs"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="not a file of a failpoint"):
        Board(path)
    assert path.read_bytes() == content
    Board(tmp_path / "board").arm("new_file_linked", 3)
    assert Board(tmp_path / "board").is_armed  # the second who comes finds what the first has made
