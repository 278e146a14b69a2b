"""Makes the types of pyengine._native for type checkers: setup.py writes them beside the C module as _native.pyi.

They come from the declarations in *.cdef.h. A struct, a pointer to it and a new array of it are one class here: all have
the fields or elements, and cffi refuses the one where the other belongs.
"""

from __future__ import annotations

import keyword
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BUILD = runpy.run_path(str(HERE / "build_native.py"))
ffi = BUILD["ffibuilder"]

HEAD = '''"""Made by the build from the declarations in csrc/*.cdef.h (csrc/native_stub.py)."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, Self, TypeVar, overload

from typing_extensions import Buffer

_T = TypeVar("_T")
_C = TypeVar("_C", bound=CData)

class CData:
    """A C value: a struct, an array, a pointer."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...
    def __int__(self) -> int: ...

class Struct(CData):
    def __getitem__(self, index: int) -> Self: ...
    def __add__(self, number: int) -> Self: ...
    def __len__(self) -> int: ...

class Array(CData, Generic[_T]):
    """An array, or a pointer to its first element."""

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice[int, int, None]) -> Array[_T]: ...
    @overload
    def __setitem__(self, index: int, value: _T) -> None: ...
    @overload
    def __setitem__(self, index: slice[int, int, None], value: object) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[_T]: ...
    def __add__(self, number: int) -> Array[_T]: ...
    def __sub__(self, number: int) -> Array[_T]: ...

class CBuffer(Buffer):
    """The memory of a C value, as ffi.buffer() gives it."""

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> bytes: ...
    def __setitem__(self, index: int | slice, value: Buffer) -> None: ...
    def __len__(self) -> int: ...
'''

FFI_HEAD = '''
_CData = CData

class _FFI:
    NULL: Any  # of every pointer's type
    CData = _CData
    new: _New
    def new_allocator(self, *, should_clear_after_alloc: bool = True) -> _New: ...
    @overload
    def addressof(self, cdata: _C) -> _C: ...
    @overload
    def addressof(self, cdata: _CData, field: str | int, *fields: str | int) -> Any: ...
'''
FFI_TAIL = '''    def buffer(self, cdata: _CData, size: int = -1) -> CBuffer: ...
    @overload
    def from_buffer(self, memory: Buffer, *, require_writable: bool = False) -> Array[bytes]: ...
    @overload
    def from_buffer(self, cdecl: str, memory: Buffer, require_writable: bool = False) -> Array[int]: ...
    def gc(self, cdata: _C, destructor: Callable[[_C], object], size: int = 0) -> _C: ...
    def list_types(self) -> tuple[list[str], list[str], list[str]]: ...
    def memmove(self, to: _CData | Buffer, source: _CData | Buffer, size: int) -> None: ...
    def offsetof(self, cdecl: str, *fields: str | int) -> int: ...
    def release(self, cdata: _CData) -> None: ...
    def sizeof(self, cdecl: str | _CData) -> int: ...
    def string(self, cdata: _CData, maxlen: int = -1) -> bytes: ...
    def typeof(self, cdecl: str | _CData) -> Any: ...  # a CType: cffi describes types for programs, not for type checkers

ffi: _FFI
lib: _Lib
'''


def python_type(ctype: Any, *, is_argument: bool = False) -> str:
    """The stub's name of a C type; an argument of bytes takes Python's too."""
    if ctype.kind == "void":
        return "None"
    if ctype.kind == "struct":
        return str(ctype.cname.removeprefix("struct "))
    if ctype.kind == "primitive":
        return "bytes" if ctype.cname == "char" else "float" if ctype.cname in ("double", "float") else "int"
    if ctype.kind == "function" or ctype.item.kind == "function":
        return "CData"
    if ctype.kind == "array":
        return f"Array[{python_type(ctype.item)}]"
    if ctype.item.kind == "struct":
        return python_type(ctype.item)
    if is_argument and (ctype.item.kind == "void" or ffi.sizeof(ctype.item) == 1):
        return "CData | bytes"
    if ctype.item.kind == "void" or is_argument:
        return "CData"
    return f"Array[{python_type(ctype.item)}]"


def structs(names: list[str]) -> Iterator[str]:
    for name in names:
        yield f"\nclass {name}(Struct):"
        for field, found in ffi.typeof(f"struct {name}").fields:
            if not keyword.iskeyword(field):
                yield f"    {field}: {python_type(found.type)}"


def functions() -> Iterator[str]:
    """The constants and functions, in the declarations' order."""
    yield "\nclass _Lib:"
    for concept in BUILD["CONCEPTS"]:
        text = re.sub(r"/\*.*?\*/", "", (HERE / f"{concept}.cdef.h").read_text(), flags=re.DOTALL)
        for name in re.findall(r"^#define (\w+)", text, re.MULTILINE):
            yield f"    {name}: int"
        for result, name, arguments in re.findall(r"^(\w[\w ]*[ *])(\w+)\(([^;]*)\);", text, re.MULTILINE):
            ctype = ffi.typeof(f"{result} (*)({arguments})")
            taken = ["self", *(f"a{i}: {python_type(each, is_argument=True)}" for i, each in enumerate(ctype.args)), "/"]
            yield f"    def {name}({', '.join(taken)}) -> {python_type(ctype.result)}: ..."


def makers(names: list[str], function: str, value: str) -> Iterator[str]:
    """The function's results, by the C type that is asked for."""
    known = [(f'"struct {name} *", "struct {name}[]"', name) for name in names]
    numbers = ("int8_t", "uint8_t", "int32_t", "uint32_t", "int64_t", "uint64_t", "int", "uint16_t", "int16_t")
    known += [
        (", ".join(f'"{number} *", "{number}[]", "{number}[2]"' for number in numbers), "Array[int]"),
        ('"char *", "char[]"', "Array[bytes]"),
    ]
    for wanted, made in known:
        yield "    @overload"
        yield f"    def {function}(self, cdecl: Literal[{wanted}], {value}) -> {made}: ..."
    yield "    @overload"
    yield f"    def {function}(self, cdecl: str, {value}) -> _CData: ..."


def stub() -> str:
    names = ffi.list_types()[1]
    new = ["\nclass _New:", *makers(names, "__call__", "init: object = ...")]
    cast = makers(names, "cast", "value: object")
    return "\n".join([HEAD.rstrip("\n"), *structs(names), *functions(), *new, FFI_HEAD.rstrip("\n"), *cast, FFI_TAIL])[:-1]


if __name__ == "__main__":
    print(stub(), end="")
