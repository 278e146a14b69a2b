"""scripts/drills.sh: the drills of docs/drills.md and of the pages that it links, run without a change."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import needs
from fix_judge import available
from interop.clients import put_mqadmin
from waiting import scaled_timeout_s

CHECKOUT = Path(__file__).parents[2]
SCRIPT = CHECKOUT / "scripts" / "drills.sh"
FOR_USERS = ("backup-and-restore", "failover", "upgrade", "lost-shared-memory")
FOR_ROOT = ("full-disk", "hung-disk")
WITH_TOOLS = "more-hosts"


def run(scratch: Path, *arguments: str, script: Path = SCRIPT, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "TMPDIR": str(scratch)} | more
    return subprocess.run([script, *arguments], capture_output=True, text=True, env=environment, timeout=scaled_timeout_s(280))


def took(scratch: Path, name: str, **more: str) -> None:
    """The drill did what its page says, and its time is told."""
    done = run(scratch, name, **more)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert re.fullmatch(rf"\| drill \| took \|\n\|---\|---:\|\n\| {name} \| \d+\.\d s \|\n", done.stdout)
    assert list(scratch.iterdir()) == [], "nothing is left"


@pytest.mark.ci
@pytest.mark.parametrize("name", FOR_USERS)
def test_a_drill_does_what_its_page_says(tmp_path, name):
    took(tmp_path, name)


@pytest.mark.ci
@pytest.mark.root
def test_the_drill_of_a_full_disk_does_what_its_page_says(tmp_path):
    took(tmp_path, "full-disk")


@pytest.mark.ci
@pytest.mark.root
@pytest.mark.block
def test_the_drill_of_a_hung_disk_does_what_its_page_says(tmp_path):
    took(tmp_path, "hung-disk")


@pytest.mark.ci
@pytest.mark.java
@pytest.mark.maven
def test_the_drill_of_more_hosts_does_what_its_page_says(tmp_path):
    """docs/hosts.md, with the published tools as `mqadmin`."""
    with available():
        command = put_mqadmin(needs.java_command(), tmp_path / "tools")
    (scratch := tmp_path / "scratch").mkdir()
    took(scratch, WITH_TOOLS, PATH=f"{command.parent}:{os.environ['PATH']}")


def test_a_drill_whose_command_is_absent_is_left_out_with_the_reason(tmp_path):
    done = run(tmp_path, WITH_TOOLS, PATH=":".join(each for each in os.environ["PATH"].split(":") if not Path(each, "mqadmin").exists()))
    assert done.returncode == 2 and "more-hosts: mqadmin is not on PATH" in done.stderr and list(tmp_path.iterdir()) == []


def test_each_drill_is_listed_and_has_its_row_on_the_page(tmp_path):
    listed = [line.split("\t")[0] for line in run(tmp_path, "--list").stdout.splitlines()]
    assert sorted(listed) == sorted((*FOR_USERS, *FOR_ROOT, WITH_TOOLS))
    page = (CHECKOUT / "docs" / "drills.md").read_text(encoding="utf-8")
    for name in listed:
        assert f"| `{name}` |" in page, name


def test_a_drill_that_does_not_go_as_its_page_says_is_named_with_what_it_printed(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "rm").write_text("#!/bin/sh\n[ \"$1\" != -r ] || { echo the rm of the test fails; exit 1; }\nexec /bin/rm \"$@\"\n")
    (tmp_path / "bin" / "rm").chmod(0o755)
    done = run(tmp_path, "lost-shared-memory", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 1 and "took |\n|---|---:|\n" in done.stdout and done.stdout.count("\n") == 2
    assert "lost-shared-memory did not do what docs/drills.md says:\n" in done.stderr and "the rm of the test fails" in done.stderr


def test_an_unknown_drill_is_refused(tmp_path):
    done = run(tmp_path, "fire")
    assert done.returncode == 2 and "no drill fire: --list shows them" in done.stderr
