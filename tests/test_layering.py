"""Imports obey the arrows: formats <- native <- storage <- ipc <- services, client <- engine <- cli.

Left never imports right, and no modules import each other in a circle, wherever the import is: inside a function, or for
annotations alone. The same file has the other rules: what an import may load, which module calls the C library, what a C
header says first.
"""

from __future__ import annotations

import ast
import functools
import gc
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from pyengine.ipc.shared_objects import KIND_NAMES

ROOT = Path(__file__).parents[1]
PACKAGES = ("pyengine", "pyspark_pyengine")
FOLDERS = {**{name: name for name in PACKAGES}, "workers": "pyengine.workers"}  # pyengine/workers is a link to workers/

# From left to right. A name is a package (with all below it) or a single module.
LAYERS = (
    ("pyengine.errors", "pyengine.arguments", "pyengine.events", "pyengine.settings", "pyengine._settings", "pyengine._front"),
    ("pyengine.formats", "pyengine.results", "pyengine.engine_config"),
    ("pyengine._native", "pyengine.native"),
    ("pyengine.storage",),
    ("pyengine.ipc",),
    ("pyengine.services", "pyengine.client"),
    ("pyengine.engine", "pyengine.gateway"),
    ("pyengine.workers", "pyengine.testing", "pyengine.arrow", "pyengine.taskiq", "pyengine.dramatiq", "pyengine.celery"),
    ("pyengine.spark", "pyspark_pyengine"),
    ("pyengine.cli", "pyengine.__main__"),
)
# Executors need the package and the store's files, nothing that runs.
SPARK_MAY_IMPORT = ("errors", "arguments", "settings", "results", "engine_config", "formats", "native", "storage", "spark")
# The driver asks a running engine how far it may read; loaded only when it plans,
# or for a job that owns the store. The sink's tasks put into an engine of their host, and lock beside its memory.
SPARK_LAZILY = {"pyengine.ipc.live_reader", "pyengine.ipc.crashed_engine_memory", "pyengine.ipc.shared_objects"}
# Names nothing but a version, and loads its public names when they are first used.
ROOT_PACKAGE = "pyengine"

HEAVY = ("click", "rich", "pyarrow", "pandas", "numpy", "pyspark", "prometheus_client", "yaml")


@dataclass(frozen=True)
class Import:
    """`module` imports `target`, at its top (each time it is loaded) or later."""

    module: str
    target: str
    line: int
    at_top: bool

    def __str__(self) -> str:
        return f"{self.module} line {self.line} imports {self.target}"


def source_files() -> dict[str, Path]:
    files = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = (*package.split("."), *path.relative_to(ROOT / folder).with_suffix("").parts)
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


FILES = source_files()


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Not parsed while tests are collected, which each process of a run does."""
    gc.collect()  # a finalizer that fails while a tree is built makes another one for its traceback: a SystemError
    return {module: ast.parse(path.read_text(), str(path)) for module, path in FILES.items()}


def is_for_annotations(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def targets(node: ast.stmt) -> list[str]:
    """Full names of the modules of ours that an import statement loads."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, "imports are written in full"
    inside = [f"{node.module}.{alias.name}" for alias in node.names]
    submodules = [name for name in inside if name in FILES or name in ("pyengine._native", "pyengine._front")]
    return submodules if len(submodules) == len(inside) else [node.module, *submodules]


def imports_of(module: str) -> list[Import]:
    found = []

    def walk(node: ast.AST, at_top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if is_for_annotations(child):
                continue
            if isinstance(child, ast.Import | ast.ImportFrom):
                found.extend(Import(module, name, child.lineno, at_top) for name in targets(child))
            walk(child, at_top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    walk(trees()[module], True)
    return [each for each in found if each.target.split(".")[0] in PACKAGES]


@functools.cache
def all_imports() -> list[Import]:
    return [each for module in FILES for each in imports_of(module)]


def named_in(module: str) -> set[str]:
    """The modules of ours that it imports anywhere, for annotations too, except the root package."""
    named = {target for node in ast.walk(trees()[module]) if isinstance(node, ast.Import | ast.ImportFrom) for target in targets(node)}
    return {target for target in named if target.split(".")[0] in PACKAGES} - {ROOT_PACKAGE}


def layer_of(module: str) -> int:
    places = [
        at for at, names in enumerate(LAYERS) for name in names if module == name or module.startswith(name + ".")
    ]
    assert len(places) == 1, f"{module} is in {len(places)} layers: give it one in LAYERS"
    return places[0]


def test_every_module_has_one_layer():
    for module in FILES:
        if module != ROOT_PACKAGE:
            layer_of(module)


def test_left_never_imports_right():
    wrong = [f"{module} imports {target}" for module in FILES if module != ROOT_PACKAGE
             for target in named_in(module) if layer_of(module) < layer_of(target)]
    assert wrong == []


def test_architecture_has_the_same_arrows():
    """The table of packages in ARCHITECTURE.md: which package imports which. Change it with the imports."""
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.MULTILINE)
    told = {package: set(re.findall(r"`(\w+)`", imported)) for package, imported in rows if f"pyengine.{package}" in FILES}
    packages = {module.split(".")[1] for module, path in FILES.items() if path.name == "__init__.py" and "." in module}
    assert told.keys() == packages
    found = {package: set() for package in packages}
    for each in all_imports():
        module, target = (*each.module.split("."), "", "")[1], (*each.target.split("."), "", "")[1]
        if module in packages and target in packages - {module}:
            found[module].add(target)
    assert told == found


def test_workers_have_one_import_name():
    """Users have packages called `workers` of their own; two names for one module would be two modules."""
    link = ROOT / "pyengine" / "workers"
    assert link.is_symlink() and os.readlink(link) == "../workers"
    wrong = [f"{module} line {node.lineno}" for module, tree in trees().items() for node in ast.walk(tree)
             if isinstance(node, ast.Import | ast.ImportFrom)
             and any(name.split(".")[0] == "workers" for name in targets(node))]
    assert wrong == []


def test_the_root_package_imports_nothing_of_ours():
    assert [str(each) for each in all_imports() if each.module == ROOT_PACKAGE] == []


def test_modules_import_each_other_in_one_direction():
    """No circle, also within a layer, inside functions and for annotations alone: each module is understood by those below it."""
    graph = {module: named_in(module) - {module} for module in FILES if module != ROOT_PACKAGE}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_spark_code_imports_only_packages_that_executors_have():
    wrong = []
    for each in all_imports():
        if not each.module.startswith(("pyengine.spark", "pyspark_pyengine")) or each.target == ROOT_PACKAGE:
            continue
        allowed = each.target.split(".")[1] in SPARK_MAY_IMPORT or (each.target in SPARK_LAZILY and not each.at_top)
        if not allowed:
            wrong.append(str(each))
    assert wrong == []


def test_formats_use_the_standard_library_only():
    for module, tree in trees().items():
        if module.startswith("pyengine.formats"):
            for node in ast.walk(tree):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) else []
                for name in names:
                    root = name.split(".")[0]
                    assert root in sys.stdlib_module_names or root == "pyengine", f"{module} imports {name}"


def test_only_the_native_layer_calls_c():
    """`ffi` (buffers, addresses) and types may be used elsewhere; `lib`, which carries the memory orders, may not."""
    for module, tree in trees().items():
        if module.startswith("pyengine.native"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "pyengine._native":
                assert "lib" not in [alias.name for alias in node.names], f"{module} line {node.lineno}"


OF_WORKERS = [module for module in FILES if module.startswith(("pyengine.workers", "pyengine.engine"))]
# Each module in a fork of an interpreter that has loaded none of ours.
LOAD_EACH = """
import importlib, os, sys
for name in sys.argv[1:]:
    if os.fork() == 0:
        importlib.import_module(name)
        print(name, *sys.modules, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.fixture(scope="module")
def loaded_with() -> dict[str, set[str]]:
    """What is loaded once a module of OF_WORKERS is."""
    run = subprocess.run([sys.executable, "-c", LOAD_EACH, *OF_WORKERS], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert run.returncode == 0, run.stderr
    return {name: set(modules) for name, *modules in map(str.split, run.stdout.splitlines())}


@pytest.mark.parametrize("name", OF_WORKERS)
def test_a_worker_loads_nothing_heavy(loaded_with, name):
    heavy = set(HEAVY) | ({"shutil"} if name.removeprefix("pyengine.workers.") in KIND_NAMES[1:] else set())
    assert name in loaded_with[name] and not heavy & loaded_with[name]


def test_every_module_has_a_docstring_and_every_package_an_init_file():
    assert [module for module, tree in trees().items() if not ast.get_docstring(tree)] == []
    folders = {path.parent for path in FILES.values()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_each_public_class_has_a_name_of_its_own():
    modules: dict[str, list[str]] = {}
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(module)
    of_adapters = modules.pop("PyengineBroker")  # each library names its brokers so, as it does those of Redis and RabbitMQ
    assert sorted(of_adapters) == ["pyengine.dramatiq", "pyengine.taskiq"]
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}


CSRC = ROOT / "csrc"
HEADERS = sorted(path.name.removesuffix(".cdef.h") for path in CSRC.glob("*.cdef.h"))


def test_every_header_is_built():
    assert sorted(runpy.run_path(str(CSRC / "build_native.py"))["CONCEPTS"]) == HEADERS


@pytest.mark.parametrize("concept", HEADERS)
def test_the_header_of_a_c_concept_says_who_blocks_and_what_a_crash_leaves(concept):
    text = (CSRC / f"{concept}.cdef.h").read_text()
    has_code = any((CSRC / f"{concept}.{kind}").is_file() for kind in ("c", "h"))
    assert has_code or not re.search(r"\);$", text, re.MULTILINE), "what it declares is nowhere"
    assert text.startswith("/* "), "the header begins with a comment"
    first = re.sub(r"\s*\n \*\s*", " ", text[: text.index("*/")])
    for part in (r"\bWho: ", r"\bBlocks on: ", r"\b(After a crash|Crash states)\b"):
        assert re.search(part, first, re.IGNORECASE), f"the first comment lacks {part!r}"
    assert not re.search(r"^\s*#\s*(?!define\b|include\b|pragma once$)", text, re.MULTILINE), "cffi reads it: no other directive"
    if (CSRC / f"{concept}.h").is_file():
        more = re.sub(r"^#(pragma once|include .*)", "", (CSRC / f"{concept}.h").read_text(), flags=re.MULTILINE)
        assert more.strip(), f"delete {concept}.h, and include what it includes in {concept}.cdef.h"
        assert "#include" not in text, f"{concept}.h includes it"


def test_one_c_file_names_memory_orders():
    named = {
        path.name
        for path in [*CSRC.glob("*.c"), *CSRC.glob("*.h")]
        if path.name != "_native.c" and re.search(r"__ATOMIC_|memory_order_|__sync_|<stdatomic\.h>", path.read_text())
    }
    assert named == {"atomics.h"}
