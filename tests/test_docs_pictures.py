"""The pictures of the pages are what docs/pictures/make.py draws, and can be read by everybody."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fix_cli import SOURCES

PICTURES = SOURCES / "docs" / "pictures"
PATH = sys.path[:]
sys.path.insert(0, str(PICTURES))

from make import ELEMENT, NAMES, PAGES  # noqa: E402
from shapes import FILLS, SCHEMES, Picture  # noqa: E402

sys.path[:] = PATH  # a picture's name may be that of a package

SCREENSHOTS = sorted(path.stem for path in PICTURES.glob("*.png"))
FILES = sorted(f"{name}{scheme}.svg" for name, scheme in product(set(NAMES) - set(SCREENSHOTS), ("", "-dark")))


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, root / "docs" / "pictures" / "make.py", "--check"], capture_output=True, text=True)


@pytest.fixture
def tree(tmp_path):
    """What the pictures are made from, and the pages that show them."""
    for folder in ("docs", "bench/notes", "monitoring", "scripts"):
        shutil.copytree(SOURCES / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SOURCES / "bench" / "figures.json", tmp_path / "bench")
    for page in SOURCES.glob("*.md"):
        shutil.copy(page, tmp_path)
    (tmp_path / "pyengine").symlink_to(SOURCES / "pyengine")
    return tmp_path


def test_pictures_and_elements_are_what_is_drawn():
    done = check(SOURCES)
    assert done.returncode == 0, done.stderr


def test_the_folder_has_the_files_of_its_pictures_only():
    assert sorted(path.name for path in PICTURES.glob("*.svg")) == FILES


@pytest.mark.ci
@pytest.mark.parametrize(("file", "old", "new"), [
    ("docs/pictures/overview-dark.svg", "commit log", "commit dog"),
    ("README.md", "pictures/overview-dark.svg", "pictures/overview.svg"),
    ("bench/figures.json", '"rate": ', '"rate": 1'),
])
def test_a_tree_with_something_else_than_what_is_drawn_fails_the_check(tree, file, old, new):
    assert check(tree).returncode == 0
    path = tree / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    done = check(tree)
    assert done.returncode == 1 and "run python docs/pictures/make.py" in done.stderr


def test_each_picture_is_on_a_page_and_has_a_text_for_who_does_not_see_it():
    shown = {found[2] for page in PAGES for found in ELEMENT.finditer(page.read_text(encoding="utf-8"))}
    assert shown == set(NAMES)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in ELEMENT.finditer(text):
            assert (page.parent / found[1] / f"{found[2]}.{'png' if found[2] in SCREENSHOTS else 'svg'}").is_file(), page
        assert text.count("<img") == text.count("<picture>") == len(ELEMENT.findall(text)), page


@pytest.mark.parametrize("file", FILES)
def test_a_picture_is_whole_and_loads_nothing(file):
    text = (PICTURES / file).read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert len(root.get("aria-label")) > 40
    assert not re.search(r"<(script|image|foreignObject|use)\b|href|@import|https?://(?!www\.w3\.org/2000/svg)", text)


def test_all_pictures_together_are_below_a_megabyte():
    assert sum(path.stat().st_size for pattern in ("*.svg", "*.png") for path in PICTURES.glob(pattern)) < 1_000_000


def luminance(colour: str) -> float:
    parts = (int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_and_lines_have_the_contrast_of_wcag_aa(scheme):
    colours = SCHEMES[scheme]
    for fill, text in product(FILLS, ("ink", "muted")):
        assert contrast(colours[text], colours[fill]) >= 4.5, (text, fill)
    for line in ("line", *(f"{fill}_edge" for fill in FILLS)):
        assert contrast(colours[line], colours["paper"]) >= 3, line
        assert contrast(colours[line], colours["grey"]) >= 3, line


def test_a_text_that_does_not_fit_is_refused():
    picture = Picture(100, 100, "", "light")
    with pytest.raises(ValueError, match="is 1.. wide, its box 90"):
        picture.box(5, 5, 90, 30, "a text that is too wide")
    with pytest.raises(ValueError, match="higher than its box"):
        picture.box(5, 5, 90, 30, "one", "two")
    picture.text(10, 20, "here")
    with pytest.raises(ValueError, match="'there' is drawn over 'here'"):
        picture.text(20, 24, "there")
    with pytest.raises(ValueError, match="outside the picture"):
        picture.text(80, 50, "far away")


def test_the_chart_of_rates_has_a_point_for_each_round_of_each_log():
    outcomes = {outcome["work"]["name"]: outcome["turns"] for outcome in
                json.loads((SOURCES / "bench" / "figures.json").read_text(encoding="utf-8"))["outcomes"]}
    text = (PICTURES / "rates.svg").read_text(encoding="utf-8")
    shown = [outcomes[work] for work in ("put, 128 B", "put, 1 KiB", "put_many(256), 1 KiB", "put_many(256), 128 B, two producers",
                                         "put, sync, 1 KiB", "put, sync, 1 KiB, four producers")]
    assert text.count("<circle") == sum(len(rounds) for turns in shown for rounds in turns.values())
