"""docs/api: up to date with the docstrings, complete, and its examples print what the pages say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

import pyengine
import pyengine.arrow
import pyengine.spark
import pyengine.testing
from fix_cli import SOURCES
from test_docs import PAGES as DOCUMENTS
from test_docs import Block, blocks_of, reader, text_of  # noqa: F401
from waiting import scaled_timeout_s

PAGES = sorted(path.name.removesuffix(".in") for path in (SOURCES / "docs" / "api").glob("*.md.in"))
WITH_SPARK = pytest.param("spark.md", marks=[pytest.mark.java, pytest.mark.spark])


@pytest.mark.griffe
def test_the_pages_are_made_from_the_docstrings_of_today():
    done = subprocess.run([sys.executable, SOURCES / "scripts" / "api_reference.py", "--check"], capture_output=True,
                          text=True, timeout=scaled_timeout_s(120), check=False)
    assert done.returncode == 0, f"run scripts/api_reference.py: {done.stdout}{done.stderr}"


PUBLIC = [f"{module.__name__}.{name}" for module in (pyengine, pyengine.arrow, pyengine.spark, pyengine.testing)
          for name in module.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_entry_and_an_example(name):
    texts = [text_of(f"docs/api/{page}") for page in PAGES]
    (page,) = [text for text in texts if re.search(rf"^(## `{name}`$|- `{name}`(:| \())", text, re.MULTILINE)]
    programs = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    assert re.search(rf"\b{name.rpartition('.')[2]}\b", programs), f"no example on its page uses {name}"


def test_the_pages_have_public_names_only():
    named = {name for page in PAGES for name in re.findall(r"^::: (\S+)", text_of(f"docs/api/{page}.in"), re.MULTILINE)}
    assert named == set(PUBLIC)


@pytest.mark.parametrize("page", [str(page) for page in DOCUMENTS])
def test_the_programs_of_a_page_import_public_names_only(page):
    """What a page shows comes from `pyengine` or one of its public modules, as their `__all__` has it."""
    modules = {name.rpartition(".")[0] for name in PUBLIC} | {"pyengine.taskiq", "pyengine.dramatiq", "pyengine.celery"}
    shown = set()
    for tree in (ast.parse(block.text) for block in blocks_of(page) if block.language == "python"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                shown |= {each.name for each in node.names if each.name.partition(".")[0] == "pyengine"}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pyengine":
                shown |= {f"{node.module}.{each.name}" for each in node.names}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pyengine":
                shown.add(f"pyengine.{node.attr}")
    private = {name for name in shown - {*PUBLIC, *modules, "pyengine.__version__"} if name.rpartition(".")[2] != "PyengineBroker"}
    assert not private, f"{page} shows what is private: {private}"


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
