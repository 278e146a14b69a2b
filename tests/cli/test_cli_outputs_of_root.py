"""Where commands of root write: through no link of another user, and in no folder in which another user can put one."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from fix_cli import run
from fix_store_builder import StoreBuilder
from pyengine.cli import report as report_page
from pyengine.client.tables import write_tables
from pyengine.errors import DiskError, EngineError
from pyengine.storage import salvage as salvage_module
from pyengine.storage.file_system import open_output, own_folder, refuse_path_of_others
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.recover import recover

pytestmark = pytest.mark.root
OTHER = 65534
SECRET = b"of root"


@pytest.fixture
def victim(tmp_path):
    """A folder of root, which each test leaves as it is: empty, or with one file."""
    folder = tmp_path / "victim"
    folder.mkdir(mode=0o700)
    yield folder
    assert {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()} in ({}, {"file": SECRET})
    assert len(list(folder.rglob("*"))) <= 1


@pytest.fixture
def store(tmp_path):
    """A store of another user."""
    builder = StoreBuilder(tmp_path / "store")
    for number in range(20):
        builder.put("T", b"body %d" % number, keys=f"k{number}")
    recover(MessageStore(builder.root, builder.geometry))
    for path in (builder.root, *builder.root.rglob("*")):
        os.chown(path, OTHER, OTHER)
    return builder.root


def link(path: Path, target: Path) -> Path:
    """A link of another user."""
    path.symlink_to(target)
    os.lchown(path, OTHER, OTHER)
    return path


def export(dest: Path) -> None:
    from pyengine.spark.export import Target

    Target.reached(os.fspath(dest), "auto").make("")


@pytest.fixture(params=["salvage", "tables", "export"])
def write_into(request, store):
    """write_into(folder): a command that writes many files into it; raises what stops it."""
    def write(dest: Path) -> None:
        if request.param == "salvage":
            done = run("salvage", store, dest)
            if done.code:
                raise EngineError(done.stderr)
        elif request.param == "tables":
            pytest.importorskip("deltalake")
            write_tables(store, dest, "delta")
        else:
            export(dest)

    return write


@pytest.mark.parametrize("make", [
    lambda folder, victim: link(folder / "dest", victim),
    lambda folder, victim: link(folder / "dest", victim) / "below",
    lambda folder, victim: link(folder / "inner", victim) / "a" / "b",
], ids=["link", "below a link", "far below a link"])
def test_a_destination_behind_a_link_of_another_user_is_refused(write_into, victim, tmp_path, make):
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", OTHER, OTHER)
    with pytest.raises(EngineError, match=r"is a link that the user 65534 made|belongs to the user 65534"):
        write_into(make(tmp_path / "theirs", victim))


@pytest.mark.parametrize("owner, mode", [(OTHER, 0o755), (0, 0o777), (0, 0o1777)], ids=["of another user", "for all", "sticky"])
def test_a_folder_in_which_another_user_can_put_a_link_is_no_destination(write_into, tmp_path, owner, mode):
    dest = tmp_path / "dest"
    dest.mkdir()
    os.chmod(dest, mode)
    os.chown(dest, owner, owner)
    with pytest.raises(EngineError, match="root writes nothing where another user can put a link"):
        write_into(dest)
    assert list(dest.iterdir()) == []


def test_a_new_folder_of_root_is_a_destination_also_behind_roots_own_link(write_into, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    write_into(tmp_path / "link" / "new")
    assert (tmp_path / "disk" / "new").is_dir()


def test_a_link_that_takes_the_destinations_place_during_a_salvage_is_not_followed(store, victim, tmp_path, monkeypatch):
    """The owner of the folder above can rename what root has made in it."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, OTHER, OTHER)

    def swap(*arguments, **named):
        (theirs / "dest").rename(theirs / "moved")
        link(theirs / "dest", victim)
        return recover(*arguments, **named)

    monkeypatch.setattr(salvage_module, "recover", swap)
    done = run("salvage", store, theirs / "dest")
    assert "/proc/" not in done.stdout + done.stderr
    assert (theirs / "moved" / "config" / "engine.toml").is_file() and (theirs / "moved" / "commitlog").is_dir()


def test_a_report_replaces_no_file_behind_a_link_of_another_user(victim, tmp_path):
    (victim / "file").write_bytes(SECRET)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, OTHER, OTHER)
    write = report_page._write
    for path in (link(theirs / "page.html", victim / "file"), link(theirs / "folder", victim) / "file"):
        with pytest.raises(DiskError, match="is a link that the user 65534 made"):
            write(path, "<html>")
    write(theirs / "other.html", "a longer page")
    write(theirs / "other.html", "<html>")
    assert (theirs / "other.html").read_text() == "<html>"
    assert (victim / "file").read_bytes() == SECRET


def test_a_report_follows_roots_own_link_and_writes_into_a_pipe(tmp_path):
    (tmp_path / "link.html").symlink_to("real.html")
    write = report_page._write
    write(tmp_path / "link.html", "<html>")
    assert (tmp_path / "real.html").read_text() == "<html>" and (tmp_path / "link.html").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(tmp_path / "pipe", "<html>")
        assert os.read(reading, 100) == b"<html>" and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    finally:
        os.close(reading)


@pytest.mark.parametrize("kind", ["link", "hard link", "folder"])
def test_a_list_of_acknowledged_messages_is_no_file_of_root_behind_a_link(victim, tmp_path, kind):
    (victim / "file").write_bytes(SECRET)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, OTHER, OTHER)
    if kind == "link":
        path = link(theirs / "acked", victim / "file")
    elif kind == "folder":
        path = link(theirs / "folder", victim) / "file"
    else:
        path = theirs / "acked"
        path.hardlink_to(victim / "file")
    with pytest.raises(DiskError, match=r"65534 made|hard link to a file of the user 0"):
        open_output(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    assert (victim / "file").read_bytes() == SECRET
    shutil.rmtree(theirs)


def test_a_file_that_root_names_is_opened_through_links_of_root_and_of_the_system(tmp_path):
    (tmp_path / "link").symlink_to("file")
    os.close(open_output(tmp_path / "link", os.O_WRONLY | os.O_CREAT))
    os.close(open_output("/dev/stderr", os.O_WRONLY))
    assert (tmp_path / "file").is_file()


def test_a_folder_that_stays_empty_is_removed_and_one_that_was_there_stays(tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("there", "new"):
        with own_folder(tmp_path / name) as held:
            assert list(held.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    refuse_path_of_others(tmp_path / "absent" / "below")
