"""scripts/replay_manifest.sh: from anywhere, into odd places, with an exit code that tells."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

from fix_golden import GOLDEN

SCRIPT = Path(__file__).parents[2] / "scripts" / "replay_manifest.sh"


def replay(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHON": sys.executable}
    return subprocess.run([SCRIPT, *map(str, arguments)], cwd=cwd, env=environ, capture_output=True, text=True, timeout=120)


def test_a_golden_manifest_replays(tmp_path):
    place = tmp_path / "an odd place"
    place.mkdir()
    done = replay(GOLDEN / "ipv6.json.gz", "a store", "sync", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["puts"] == 53
    assert (place / "a store" / "commitlog").is_dir() and not (place / "a store" / "abort").exists()
    again = replay(GOLDEN / "ipv6.json.gz", "a store", cwd=place)
    assert again.returncode == 2 and "holds a store already" in again.stderr


def test_one_other_answer_fails(tmp_path):
    manifest = json.loads(gzip.decompress((GOLDEN / "emptybody.json.gz").read_bytes()))
    manifest["puts"][4]["phy"] += 1
    (tmp_path / "m.json").write_text(json.dumps(manifest))
    done = replay("m.json", "store", cwd=tmp_path)
    assert done.returncode == 1
    assert "put 4: physical_offset is" in done.stderr


def test_arguments_are_explained(tmp_path):
    done = replay("only-one", cwd=tmp_path)
    assert done.returncode == 1 and "usage: scripts/replay_manifest.sh MANIFEST STORE" in done.stderr
