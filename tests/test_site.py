"""The pages build as a site, without a warning, and its search finds words without a server."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fix_cli import SOURCES


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_site_builds_without_a_warning_and_is_searched_offline(tmp_path):
    pytest.importorskip("sphinx")
    done = subprocess.run([SOURCES / "scripts" / "site", tmp_path / "site"], capture_output=True, text=True,
                          env=os.environ | {"PYENGINE_VENV": sys.prefix})
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "site" / "searchindex.js").read_text(encoding="utf-8")
    assert '"watermark"' in index and "docs/recovery" in index
    page = (tmp_path / "site" / "docs" / "README.html").read_text(encoding="utf-8")
    assert 'href="consumers.html"' in page and "<script src=\"http" not in page
    commands = (tmp_path / "site" / "docs" / "commands.html").read_text(encoding="utf-8")
    assert "--json for one document" in commands, "an option has two hyphens"
    shown = {path.name for path in (SOURCES / "docs" / "pictures").iterdir() if path.suffix in (".svg", ".png")}
    assert {path.name for path in (tmp_path / "site" / "docs" / "pictures").iterdir()} == shown
