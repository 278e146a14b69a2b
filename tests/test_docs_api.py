"""docs/api: up to date with the docstrings, complete, and its examples print what the pages say."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import pyengine
import pyengine.spark
from fix_cli import SOURCES
from test_docs import Block, reader, text_of  # noqa: F401
from waiting import scaled_timeout_s

PAGES = sorted(path.name.removesuffix(".in") for path in (SOURCES / "docs" / "api").glob("*.md.in"))
WITH_SPARK = pytest.param("spark.md", marks=[pytest.mark.java, pytest.mark.spark])


@pytest.mark.griffe
def test_the_pages_are_made_from_the_docstrings_of_today():
    done = subprocess.run([sys.executable, SOURCES / "scripts" / "api_reference.py", "--check"], capture_output=True,
                          text=True, timeout=scaled_timeout_s(120), check=False)
    assert done.returncode == 0, f"run scripts/api_reference.py: {done.stdout}{done.stderr}"


def test_every_public_name_has_an_entry_and_an_example():
    texts = [text_of(f"docs/api/{page}") for page in PAGES]
    names = [f"pyengine.{name}" for name in pyengine.__all__ if name != "__version__"]
    names += [f"pyengine.spark.{name}" for name in pyengine.spark.__all__]
    for name in names:
        (page,) = [text for text in texts if f"\n## `{name}`\n" in text]
        programs = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", programs), f"no example on its page uses {name}"


def test_a_page_hides_no_method_of_a_public_class():
    """What only other parts of the package call is private: a directive leaves out values and members of the standard library alone."""
    for page in (SOURCES / "docs" / "api").glob("*.md.in"):
        for name, words in re.findall(r"^::: (\S+) without (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            hidden = set(words.split(", ")) - {"constructor", "attributes", "inherited"}
            assert hidden <= {"exit_code", "errno", "path", "set_result"}, f"{page.name} leaves {hidden} of {name} out: make them private"


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [WITH_SPARK if page == "spark.md" else page for page in PAGES])
def test_the_examples_of_a_page_print_what_it_says(page, reader):  # noqa: F811
    found = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", text_of(f"docs/api/{page}"), re.DOTALL | re.MULTILINE)
    assert found
    for program, printed in found:
        assert reader.run(Block(f"docs/api/{page}", "python", program)) == printed
