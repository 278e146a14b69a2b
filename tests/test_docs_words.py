"""No page has more words than its row of tests/page_words.toml allows, and all together not more than `total`.

The alternative text of a picture is not counted: who sees the picture does not read it.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fix_cli import SOURCES

BUDGET = tomllib.loads((Path(__file__).parent / "page_words.toml").read_text(encoding="utf-8"))
PUBLISHED = sorted(
    str(path.relative_to(SOURCES)) for pattern in ("*.md", "docs/**/*.md") for path in SOURCES.glob(pattern))


def words_of(page: str) -> int:
    return len(re.sub(r"<picture>.*?</picture>", "", (SOURCES / page).read_text(encoding="utf-8"), flags=re.DOTALL).split())


@pytest.mark.parametrize("page", PUBLISHED)
def test_a_page_keeps_its_budget(page):
    allowed = BUDGET["pages"].get(page)
    assert allowed is not None, f"{page} has no row in tests/page_words.toml: give it one, and take its words from another page"
    assert words_of(page) <= allowed, f"{page}: {words_of(page)} words, {allowed} are allowed: shorten it, or move what another page has"


def test_all_pages_together_keep_the_budget():
    assert sum(words_of(page) for page in PUBLISHED) <= BUDGET["total"]


def test_each_row_is_a_page():
    assert sorted(BUDGET["pages"]) == PUBLISHED
