"""The site: these pages as HTML, by `scripts/site`. Sphinx reads Markdown (MyST); the theme is Furo; the search needs no server.

The pages are written for a Git host first: what only Sphinx needs (the tree of pages) is here and not in them. Sources are
the checkout's root, so that README.md and the pages beside it are part of the site.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
assert VERSION

project, author, copyright = "pyengine", "the pyengine contributors", "the pyengine contributors"
release = version = VERSION[1]
root_doc = "docs/README"
PARTS = {
    "Start": ["README"],
    "Tutorials": ["docs/tutorial"],
    "How-to: programs": ["docs/consumers", "docs/retries", "docs/delayed", "docs/transactions", "docs/topics", "docs/tasks",
                          "docs/python", "docs/processes", "docs/recipes"],
    "How-to: data": ["docs/arrow", "docs/tables", "docs/spark"],
    "How-to: operations": ["docs/operations", "docs/systemd", "docs/containers", "docs/cleaning", "docs/backup", "docs/replication",
                           "docs/hosts", "docs/drills", "docs/capacity", "docs/upgrades", "docs/gateway", "docs/queues"],
    "Reference": ["docs/api/README", "docs/commands", "docs/configuration", "docs/events", "docs/statistics", "docs/formats",
                  "docs/compatibility", "docs/glossary"],
    "Explanation": ["docs/promises", "ARCHITECTURE", "docs/recovery", "docs/performance", "docs/faults", "docs/proof", "docs/security",
                    "docs/design/README"],
    "Project": ["CONTRIBUTING", "CHANGELOG", "SECURITY", "CODE_OF_CONDUCT", "tests/README", "bench/README", "bench/notes/engine",
                "examples/clients/README"],
}
BELOW = {"docs/api/README": sorted(str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.glob("docs/api/*.md")),
         "docs/design/README": sorted(str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.glob("docs/design/*.md"))}

extensions = ["myst_parser"]
include_patterns = ["*.md", "docs/**.md", "tests/README.md", "bench/README.md", "bench/notes/**.md", "examples/clients/README.md"]
myst_heading_anchors = 4  # links to sections work as on a Git host
suppress_warnings = ["misc.highlighting_failure"]  # blocks of shell are shown as they are
smartquotes = False  # `--json` in a sentence stays two hyphens
highlight_language = "none"  # of blocks that name none
html_theme = "furo"
html_title = f"pyengine {release}"
html_copy_source = html_show_sourcelink = html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}


def tree(names: list[str], caption: str = "") -> str:
    head = f"```{{toctree}}\n:hidden:\n:maxdepth: 1\n{f':caption: {caption}' if caption else ''}\n\n"
    return head + "".join(f"/{name}\n" for name in names) + "```\n"


def add_tree(app: Sphinx, name: str, content: list[str]) -> None:
    if name == root_doc:
        content[0] += "\n\n" + "\n".join(tree(names, part) for part, names in PARTS.items())
    elif name in BELOW:
        content[0] += "\n\n" + tree([below for below in BELOW[name] if below != name])


def copy_pictures(app: Sphinx, error: Exception | None) -> None:
    """Pages show pictures by <picture>, which Sphinx does not follow."""
    if error is None:
        shutil.copytree(ROOT / "docs" / "pictures", Path(app.outdir) / "docs" / "pictures", dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("*.py", "__pycache__", "*.json"))


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_tree)
    app.connect("build-finished", copy_pictures)
