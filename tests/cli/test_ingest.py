"""The division of files into ranges: each line is in one range."""

from __future__ import annotations

import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.cli.ingest import Range, find_files, read_blocks, share_out, size_of
from pyengine.errors import UsageError

texts = st.lists(st.sampled_from([b"", b"a", b"bc", b"x" * 40]), max_size=30).map(b"\n".join)


@given(text=texts, cuts=st.lists(st.integers(0, 700), max_size=6), block_bytes=st.integers(1, 64))
def test_every_line_belongs_to_exactly_one_range(text, cuts, block_bytes):
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    lines = []
    for start, end in itertools.pairwise(bounds):
        for block in read_blocks(io.BytesIO(text), start, end, block_bytes):
            lines += block.removesuffix(b"\n").split(b"\n")
    assert lines == [line.removesuffix(b"\n") for line in io.BytesIO(text).readlines()]


@given(sizes=st.lists(st.integers(0, 1000), max_size=8), producers=st.integers(1, 5))
def test_shares_cover_every_byte_once_and_are_equal(sizes, producers):
    files = [(f"f{number}", size) for number, size in enumerate(sizes)]
    shares = share_out(files, producers)
    assert len(shares) == producers
    covered = {path: [] for path, _ in files}
    for share in shares:
        assert abs(sum(end - start for _, start, end in share) - sum(sizes) / producers) <= 1
        for path, start, end in share:
            covered[path].append((start, end))
    for path, size in files:
        at = 0
        for start, end in covered[path]:
            assert start == at and end > start
            at = end
        assert at == size


def test_folders_stand_for_their_files_in_order(tmp_path):
    for name in ("b/2.py", "b/1.py", "a.txt", "b/c/3.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    names = [str(path.relative_to(tmp_path)) for path in find_files([tmp_path / "a.txt", tmp_path / "b"], "*.py")]
    assert names == ["a.txt", "b/1.py", "b/2.py", "b/c/3.py"]


@pytest.mark.parametrize(("name", "sentence"), [("gone", "does not exist"), ("empty", "contains no file")])
def test_a_missing_path_is_refused(tmp_path, name, sentence):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=sentence):
        find_files([tmp_path / name], None)


def test_a_file_without_an_end_is_refused():
    with pytest.raises(UsageError, match="not a regular file"):
        size_of("/dev/null")


def test_a_range_is_plain_data():
    assert list(Range("a", 0, 1)) == ["a", 0, 1]
