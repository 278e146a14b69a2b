"""`pyengine config explain`."""

from __future__ import annotations

from fix_cli import environment, picture, run, spawn
from pyengine.engine_config import FIXED_NAMES
from pyengine.storage.config import SETTINGS


def test_explain_shows_every_setting_with_its_origin(monkeypatch):
    monkeypatch.setenv("PYENGINE_PUT_TIMEOUT_MS", "77")
    document = run("config", "explain", "--json", "--set", "flushDiskType=SYNC_FLUSH").document
    by_name = {row["name"]: row for row in document["settings"]}
    assert set(by_name) == set(SETTINGS)
    assert document["mode"] == "sync"
    assert (by_name["flush_disk_type"]["value"], by_name["flush_disk_type"]["from"]) == ("SYNC_FLUSH", "--set")
    assert (by_name["put_timeout_ms"]["value"], by_name["put_timeout_ms"]["from"]) == (77, "environment")
    assert by_name["max_index_num"] | {"meaning": ""} == {
        "name": "max_index_num", "value": 20000000, "default": 20000000, "from": "default", "unit": "",
        "key": "maxIndexNum", "fixed": True, "without_effect_because": None, "meaning": ""}
    assert {name for name, row in by_name.items() if row["fixed"]} == set(FIXED_NAMES)


def test_changed_shows_only_what_differs(tmp_path):
    ran = run("config", "explain", "--changed", "--set", "put_timeout_ms=5s")
    assert "put_timeout_ms" in ran.stdout and "5000" in ran.stdout and "flush_disk_type" not in ran.stdout


def test_no_color_in_a_pipe_and_none_with_no_color():
    ran = spawn("config", "explain", env=environment(NO_COLOR="1"))
    assert ran.code == 0 and "\x1b" not in ran.stdout
    assert len(ran.stdout.splitlines()) >= len(SETTINGS)


def test_a_wrong_setting_is_a_usage_error_with_a_sentence(tmp_path):
    for wrong, sentence in (("flushDiskTyp=x", "did you mean flush_disk_type?"), ("put_timeout_ms=0", "1 to 86,400,000 ms"),
                            ("nonsense", "give key=value")):
        ran = run("config", "explain", "--set", wrong)
        assert ran.code == 2 and ran.stdout == "" and sentence in ran.stderr


def test_a_wrong_file_is_reported_and_left_alone(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "engine.toml").write_text("flush_disk_type = [\n")
    before = picture(tmp_path)
    ran = run("config", "explain", tmp_path)
    assert ran.code == 2 and "no valid TOML" in ran.stderr and picture(tmp_path) == before
