"""Makes docs/api from the docstrings of the public names.

usage: python scripts/api_reference.py [--check]

Each file `X.md.in` of docs/api is text with examples; the page `X.md` beside it is made from it. A line
`::: pyengine.Producer` is replaced by the signature and the docstring of that name, and of its public members;
`without constructor, attributes, inherited, put` after the name leaves these and the member `put` out. Of a module only
the docstring is taken. `--check` writes nothing and fails where a page is out of date. Reads the sources with griffe
(extra `docs`) and imports none of them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "api"
WIDTH = 110
REPEATED = 4  # so many keywords that an earlier method has too are named and not described again
DIRECTIVE = re.compile(r"^::: (\S+)(?: without (.*))?$", re.MULTILINE)
MADE = "<!-- Made by scripts/api_reference.py from {source} and the docstrings: change those. -->\n\n"


class Reference:
    """The public names of the package, as its sources have them."""

    def __init__(self, root: Path = ROOT) -> None:
        self._package = griffe.load("pyengine", search_paths=[str(root)], resolve_aliases=True)

    def page(self, source: Path) -> str:
        """The text of a page with each directive replaced."""
        text = DIRECTIVE.sub(lambda found: self._entry(found[1], set((found[2] or "").split(", "))),
                             source.read_text(encoding="utf-8"))
        return MADE.format(source=source.name) + text

    def _entry(self, path: str, left_out: set[str]) -> str:
        found = self._object(path)
        if isinstance(found, griffe.Module):
            return _text(found)
        parts = [f"## `{path if self._is_exported(path) else found.name}`", *_described(found, found.name, left_out)]
        if not isinstance(found, griffe.Class):
            return "\n\n".join(parts)
        members = {name: member for name, member in _members(found, with_inherited="inherited" not in left_out)
                   if name not in left_out}
        rows = [_row(name, member) for name, member in members.items()
                if _is_value(member) and (_is_enumeration(found) or _is_described(member))]
        if rows and "attributes" not in left_out:
            head = "| member | value | meaning |" if _is_enumeration(found) else "| attribute | type | meaning |"
            parts.append("\n".join([head, "|---|---|---|", *rows]))
        earlier: dict[str, list[str]] = {}
        for name, member in members.items():
            if isinstance(member, griffe.Function) and not _is_value(member):
                parts += [f"### `{found.name}.{name}`", *_described(member, name, left_out, earlier)]
                earlier.setdefault(name, _pieces(member))
        return "\n\n".join(parts)

    def _object(self, path: str) -> griffe.Object:
        found = self._package[path.removeprefix("pyengine.")]
        return found.final_target if isinstance(found, griffe.Alias) else found

    def _is_exported(self, path: str) -> bool:
        module, _, name = path.rpartition(".")
        exports = self._package.exports if module == "pyengine" else self._package[module.removeprefix("pyengine.")].exports
        return name in {str(each) for each in exports or ()}


def _members(cls: griffe.Class, *, with_inherited: bool) -> Iterator[tuple[str, griffe.Object]]:
    """Public members in the order of the sources, those of base classes in this package last."""
    seen = set()
    for each in (cls, *(cls.mro() if with_inherited else ())):
        for name, member in each.members.items():
            if not name.startswith("_") and name not in seen and not isinstance(member, griffe.Alias):
                seen.add(name)
                yield name, member


def _is_value(member: griffe.Object) -> bool:
    return isinstance(member, griffe.Attribute) or "property" in member.labels


def _is_described(member: griffe.Object) -> bool:
    """Whether it has a type or a docstring; what __init__ assigns without either is not for users."""
    return bool(member.docstring) or not isinstance(member, griffe.Attribute) or member.annotation is not None


def _is_enumeration(found: griffe.Object) -> bool:
    return isinstance(found, griffe.Class) and any(str(base).startswith("enum.") for base in found.bases)


def _described(found: griffe.Object, name: str, left_out: set[str], earlier: dict[str, list[str]] | None = None) -> list[str]:
    """Signature and docstring; `earlier`: the parameters of the methods before it, which are not repeated."""
    parts = []
    function = found.members.get("__init__") if isinstance(found, griffe.Class) else found
    if isinstance(function, griffe.Function) and not (function is not found and "constructor" in left_out):
        parts.append(f"```py\n{_signature(name, function, earlier or {}, is_class=function is not found)}\n```")
    else:
        function = found
    return parts + [_text(each) for each in dict.fromkeys((found, function)) if each.docstring]


def _text(found: griffe.Object) -> str:
    """The docstring, with links to the pages that it names."""
    text = inspect.cleandoc(found.docstring.value) if found.docstring else ""
    return re.sub(r"\bdocs/([\w/-]+\.md)", r"[\1](../\1)", text)


def _pieces(function: griffe.Function) -> list[str]:
    """The parameters as in the source, without `self`."""
    kinds = griffe.ParameterKind
    pieces: list[str] = []
    for parameter in function.parameters:
        if parameter.name in ("self", "cls") and parameter.annotation is None:
            continue
        if parameter.kind is kinds.keyword_only and "*" not in pieces:
            pieces.append("*")
        text = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and parameter.kind not in (kinds.var_positional, kinds.var_keyword):
            text += f" = {parameter.default}"
        pieces.append(text)
    return pieces


def _signature(name: str, function: griffe.Function, earlier: dict[str, list[str]], *, is_class: bool) -> str:
    """One parameter a line where it is long; keywords that an earlier method has as well only by name."""
    pieces = _pieces(function)
    for other, its in earlier.items():
        same = [piece for piece in pieces if piece in its and "=" in piece]
        if len(same) >= REPEATED:
            names = ", ".join(piece.partition(":")[0] for piece in same)
            pieces = [*(piece for piece in pieces if piece not in same), f"# as in {other}(): {names}"]
            break
    before = "" if is_class else "async def " if "async" in function.labels else "def "
    after = "" if is_class or function.returns is None else f" -> {function.returns}"
    line = f"{before}{name}({', '.join(pieces)}){after}"
    if len(line) <= WIDTH and "#" not in line:
        return line
    return f"{before}{name}(\n" + "".join(f"    {piece}{'' if piece.startswith('#') else ','}\n" for piece in pieces) + f"){after}"


def _row(name: str, member: griffe.Object) -> str:
    """The table row of an attribute, a property, or a member of an enumeration."""
    kind = member.annotation if isinstance(member, griffe.Attribute) else getattr(member, "returns", None)
    if kind is None and isinstance(member, griffe.Attribute):
        kind = member.value
    meaning = " ".join(_text(member).split())
    cell = f"`{kind}`".replace("|", "\\|") if kind is not None else ""
    return f"| `{name}` | {cell} | {meaning.replace('|', chr(92) + '|')} |"


def main(arguments: list[str]) -> int:
    reference = Reference()
    stale = []
    for source in sorted(PAGES.glob("*.md.in")):
        target, text = source.with_suffix(""), reference.page(source)
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            stale.append(target.name)
            if "--check" not in arguments:
                target.write_text(text, encoding="utf-8")
    print(f"{'out of date' if '--check' in arguments else 'written'}: {', '.join(stale) or 'none'}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
