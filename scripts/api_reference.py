"""Makes docs/api from the docstrings of the public names.

usage: python scripts/api_reference.py [--check]

Each file `X.md.in` of docs/api is text with examples; the page `X.md` beside it is made from it. A line
`::: pyengine.Producer` is replaced by the signature and the docstring of that name, and of its public members;
`without constructor, attributes, inherited, put` after the name leaves these and the member `put` out; an error without
constructor is an item of a list. Of a module only the docstring is taken. Signatures have the short names of SHORT, and
`x: int = None` for `x: int | None = None`. `--check` writes nothing and fails where a page is out of date. Reads the sources
with griffe (extra `docs`) and imports none of them.
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
WIDTH = 140
REPEATED = 3  # so many keywords that an earlier method has too are named and not described again
SAME = re.compile(r"As ([A-Z]\w+)\.(\w+)\.")  # the whole docstring of a member that is what another class's is
SHORT = {"str | os.PathLike[str]": "StrPath", "datetime | timedelta | int": "When",
         "Callable[[int, int], None]": "Progress", "Callable[[int, int | None], None]": "Progress"}  # docs/api/README.md explains them
DIRECTIVE = re.compile(r"^::: (\S+)(?: without (.*))?$", re.MULTILINE)
MADE = "<!-- Made by scripts/api_reference.py from {source} and the docstrings: change those. -->\n\n"


class Reference:
    """The public names of the package, as its sources have them."""

    def __init__(self, root: Path = ROOT) -> None:
        self._package = griffe.load("pyengine", search_paths=[str(root)], resolve_aliases=True)

    def page(self, source: Path) -> str:
        """The text of a page with each directive replaced; keywords of an earlier entry are named and not repeated."""
        self._earlier: dict[str, list[str]] = {}
        self._owners: dict[str, str] = {}  # of members of base classes: the class that has described it
        text = DIRECTIVE.sub(lambda found: self._entry(found[1], set((found[2] or "").split(", "))),
                             source.read_text(encoding="utf-8"))
        return MADE.format(source=source.name) + re.sub(r"^(- `pyengine\..*)\n\n(?=- `pyengine\.)", r"\1\n", text, flags=re.MULTILINE)

    def _entry(self, path: str, left_out: set[str]) -> str:
        found = self._object(path)
        if isinstance(found, griffe.Module):
            return _text(found)
        shown = f"## `{path if self._is_exported(path) else found.name}`"
        if not isinstance(found, griffe.Class):
            if not isinstance(found, griffe.Function):
                return "\n\n".join([shown, _text(found)])
            signature = _signature(found.name, found, self._earlier)
            self._earlier[found.name] = _pieces(found)
            return "\n\n".join([shown, f"```py\n{signature}\n```", _text(found)])
        if _is_plain_error(found, left_out):
            base = str(found.bases[0]).rpartition(".")[2]
            return f"- `{path}`{f' (`{base}`)' if base != 'Exception' else ''}: {' '.join(_text(found).split())}"
        made = found.members.get("__init__")
        maker = made if isinstance(made, griffe.Function) and "constructor" not in left_out else None
        parts = [shown, *([f"```py\n{_signature(found.name, maker, {}, is_class=True)}\n```"] if maker else []), *_docstrings(found, maker)]
        members = {name: member for name, member in _members(found, with_inherited="inherited" not in left_out)
                   if name not in left_out}
        others = {name: self._same(found, name, member) for name, member in members.items()}
        siblings = {other: [f"`{name}`" for name in others if others[name] == other] for other in others.values() if other}
        members = {name: member for name, member in members.items() if not others[name]}
        values = {name: member for name, member in members.items()
                  if _is_value(member) and (_is_enumeration(found) or _is_described(member))}
        if "attributes" not in left_out:
            parts += _value_items(found, values, {each.name for each in maker.parameters} if maker else set())
        methods = {name: member for name, member in members.items() if isinstance(member, griffe.Function) and not _is_value(member)}
        earlier = dict(self._earlier)
        for name, member in methods.items():
            parts.append(_method_item(name, member, earlier))
            earlier[name] = self._earlier[f"{found.name}.{name}"] = _pieces(member)
        parts += [f"- {', '.join(names)}: as of `{other}`" for other, names in siblings.items()]
        return re.sub(r"\n\n(?=- )", "\n", "\n\n".join(parts)).replace("\n- ", "\n\n- ", 1)

    def _same(self, found: griffe.Class, name: str, member: griffe.Object) -> str:
        """The class that says all of this member: another one of its base class, or the one that its docstring names; else ""."""
        owner = self._owners.setdefault(member.canonical_path, found.name)
        if owner != found.name:
            return owner
        same = SAME.fullmatch(_text(member))
        is_same = same and same[2] == name and (
            _is_value(member) or _first(member) == _first(self._object(f"pyengine.{same[1]}").members[name]))
        return same[1] if same and is_same else ""

    def _object(self, path: str) -> griffe.Object:
        found = self._package[path.removeprefix("pyengine.")]
        return found.final_target if isinstance(found, griffe.Alias) else found

    def _is_exported(self, path: str) -> bool:
        module, _, name = path.rpartition(".")
        exports = self._package.exports if module == "pyengine" else self._package[module.removeprefix("pyengine.")].exports
        return name in {str(each) for each in exports or ()}


def _members(cls: griffe.Class, *, with_inherited: bool) -> Iterator[tuple[str, griffe.Object]]:
    """Public members in the order of the sources, those of base classes in this package last, or not even those that hide one."""
    seen = set() if with_inherited else {name for base in cls.mro() for name in base.members}
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


def _is_plain_error(found: griffe.Class, left_out: set[str]) -> bool:
    """Whether it is an exception of which the text says all."""
    return found.name.endswith("Error") and "constructor" in left_out


def _is_enumeration(found: griffe.Object) -> bool:
    return isinstance(found, griffe.Class) and any(str(base).startswith("enum.") for base in found.bases)


def _docstrings(found: griffe.Object, maker: griffe.Function | None) -> list[str]:
    return [_text(each) for each in dict.fromkeys((found, maker)) if each is not None and each.docstring]


def _value_items(found: griffe.Class, values: dict[str, griffe.Object], in_signature: set[str]) -> list[str]:
    """An item for each value with a meaning; those that only have a type are one item, by type, or in the signature already."""
    if _is_enumeration(found):
        shown = {name: f"- `{name}`{f' ({member.value})' if getattr(member, 'value', None) else ''}" for name, member in values.items()}
        return [f"{shown[name]}: {_line(member)}" if member.docstring else shown[name] for name, member in values.items()]
    typed = {name: f"`{name}`" if name in in_signature else f"`{name}: {_type(member)}`" for name, member in values.items()}
    bare: dict[str, list[str]] = {}
    for name, member in values.items():
        if not member.docstring and name not in in_signature:
            bare.setdefault(_type(member), []).append(name)
    shown = "; ".join(f"`{', '.join(names)}: {kind}`" for kind, names in bare.items())
    return [*([f"- {shown}"] if shown else []),
            *(f"- {typed[name]}: {_line(member)}" for name, member in values.items() if member.docstring)]


def _method_item(name: str, member: griffe.Function, earlier: dict[str, list[str]]) -> str:
    """One item of a list: the signature, in a block of its own where it is long, and the docstring."""
    signature, text = _signature(name, member, earlier), _text(member)
    if text.startswith("Return ") and "->" in signature:
        text = text[7].upper() + text[8:]
    if "\n" in signature:
        return "\n".join(["- ```py", *(f"  {line}" for line in signature.splitlines()), "  ```", "", *(
            f"  {line}".rstrip() for line in text.splitlines())])
    first, *rest = (f"- `{signature}`: {text}" if text else f"- `{signature}`").splitlines()
    return "\n".join([first, *(f"  {line}".rstrip() for line in rest)])


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
        if parameter.annotation is not None and not _says_its_type(parameter):
            kind = _short(str(parameter.annotation))
            text += f": {kind.removesuffix(' | None') if str(parameter.default) == 'None' else kind}"
        if parameter.default is not None and parameter.kind not in (kinds.var_positional, kinds.var_keyword):
            default = "..." if str(parameter.default).startswith("lambda") else parameter.default
            text += f" = {default}" if ":" in text else f"={default}"
        pieces.append(text)
    return pieces


def _first(method: griffe.Object) -> str:
    """Return the name of the first parameter."""
    pieces = _pieces(method) if isinstance(method, griffe.Function) else []
    return next((re.split("[:=]", piece)[0] for piece in pieces if piece != "*"), "")


def _says_its_type(parameter: griffe.Parameter) -> bool:
    """Whether the default is a number, a text or a truth value, and nothing else is taken."""
    return str(parameter.annotation) in ("int", "float", "str", "bool") and re.match(r"[-\d'\"TF]", str(parameter.default)) is not None


def _signature(name: str, function: griffe.Function, earlier: dict[str, list[str]], *, is_class: bool = False) -> str:
    """One parameter a line where it is long; keywords that an earlier method has as well only by its name."""
    pieces = _pieces(function)
    if earlier.get(name.removesuffix("_async")) == pieces:
        pieces, earlier = ["..."], {}
    pieces = _with_options(function, pieces, earlier)
    for other, its in earlier.items():
        same = [piece for piece in pieces if piece in its and "=" in piece]
        if len(same) >= REPEATED:
            left = [re.split("[:=]", piece)[0] for piece in its if "=" in piece and piece not in same]
            pieces = [piece for piece in pieces if piece not in same]
            rest = [pieces.pop()] if pieces and pieces[-1].startswith("**") else []
            pieces += [f"# the keywords of {other}(){' except ' + ', '.join(left) if left else ''}", *rest]
            break
    before = "" if is_class or "async" not in function.labels else "async "
    after = "" if is_class or str(function.returns) == "None" else f" -> {_short(str(function.returns))}"
    line = f"{before}{name}({', '.join(pieces)}){after}"
    if len(line) <= WIDTH and "#" not in line:
        return line
    return f"{before}{name}(\n" + "".join(f"    {piece}{'' if piece.startswith('#') else ','}\n" for piece in pieces) + f"){after}"


def _with_options(function: griffe.Function, pieces: list[str], earlier: dict[str, list[str]]) -> list[str]:
    """The parameters with those that `**options: Unpack[X]` stands for, if an earlier method has all of them."""
    found = re.fullmatch(r"\*\*\w+: Unpack\[(\w+)\]", pieces[-1]) if pieces else None
    if found is None:
        return pieces
    options = function.module[found[1]]
    options = options.final_target if isinstance(options, griffe.Alias) else options
    names = {name for each in (options, *options.mro()) for name, member in each.members.items() if isinstance(member, griffe.Attribute)}
    for its in earlier.values():
        known = [piece for piece in its if re.split("[:=]", piece)[0] in names]
        if len(known) == len(names):
            return [*pieces[:-1], *([] if "*" in pieces else ["*"]), *known]
    return pieces


def _type(member: griffe.Object) -> str:
    kind = member.annotation if isinstance(member, griffe.Attribute) else getattr(member, "returns", None)
    if kind is None and isinstance(member, griffe.Attribute):
        kind = member.value
    return _short(str(kind))


def _short(kind: str) -> str:
    for long, short in SHORT.items():
        kind = kind.replace(long, short)
    return kind


def _line(member: griffe.Object) -> str:
    return " ".join(_text(member).split())


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
