"""Draw the pictures of the pages, NAME.svg and NAME-dark.svg of each NAME.py here that draws, and set the pages' <picture> elements.

usage: python docs/pictures/make.py [--check] [NAME ...]

A page shows a picture where it has an element <picture> whose <img> names the file; the alternative text comes from NAME.py. A
NAME.py that does not draw describes the screenshot NAME.png. --check changes nothing and fails where the tree has something else
than what would be made. Charts are drawn from bench/figures.json and the tables of bench/notes/engine.md, names and limits from
pyengine itself.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.sax.saxutils import quoteattr

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from shapes import SCHEMES, Picture  # noqa: E402

COMMON = ("make", "shapes", "charts", "terminal", "record")
NAMES = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in COMMON)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/api/*.md.in")])
ELEMENT = re.compile(r"<picture>\n(?:(?!</picture>).)*?src=\"([^\"]*?)([a-z_]+)\.(?:svg|png)\".*?</picture>", re.DOTALL)


def drawn(module: ModuleType) -> dict[str, str]:
    """The files of one picture, by their names."""
    name, alt = module.__name__, " ".join(module.ALT.split())
    files: dict[str, str] = {}
    if not hasattr(module, "draw"):
        return files
    for scheme in SCHEMES:
        picture = Picture(*module.SIZE, alt, scheme)
        try:
            module.draw(picture)
        except ValueError as error:
            raise SystemExit(f"{name}.py: {error}") from None
        files[f"{name}{'' if scheme == 'light' else '-' + scheme}.svg"] = picture.svg()
    return files


def with_elements(page: str, alts: dict[str, str]) -> str:
    """The page with each of its <picture> elements as it has to be."""

    def element(found: re.Match[str]) -> str:
        folder, name = found.groups()
        if name not in alts:
            raise SystemExit(f"no picture is named {name}")
        is_drawn = not (HERE / f"{name}.png").exists()
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="{folder}{name}-dark.svg">\n' if is_drawn else ""
        return f'<picture>\n{dark}<img alt={quoteattr(alts[name])} src="{folder}{name}.{"svg" if is_drawn else "png"}">\n</picture>'

    return ELEMENT.sub(element, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    arguments = parser.parse_args()
    modules = {name: importlib.import_module(name) for name in NAMES}
    wanted = {HERE / file: svg for name in arguments.names or NAMES for file, svg in drawn(modules[name]).items()}
    alts = {name: " ".join(module.ALT.split()) for name, module in modules.items()}
    wanted |= {page: with_elements(page.read_text(encoding="utf-8"), alts) for page in PAGES}
    for path, text in wanted.items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if arguments.check:
            sys.exit(f"{path.relative_to(ROOT)} is not what is drawn: run python docs/pictures/make.py")
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
