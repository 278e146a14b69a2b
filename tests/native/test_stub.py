"""The build's types of the C module have all that it declares."""

from __future__ import annotations

import ast
import keyword
from pathlib import Path

import pyengine
from pyengine._native import ffi, lib


def test_the_stub_has_each_function_constant_struct_and_field():
    classes = {each.name: each for each in ast.parse(Path(pyengine.__file__).with_name("_native.pyi").read_text()).body
               if isinstance(each, ast.ClassDef)}
    members = {name: {each.name if isinstance(each, ast.FunctionDef) else each.target.id for each in found.body
                      if isinstance(each, ast.FunctionDef | ast.AnnAssign)} for name, found in classes.items()}
    assert members["_Lib"] == set(dir(lib))
    for name in ffi.list_types()[1]:
        assert members[name] == {field for field, _ in ffi.typeof(f"struct {name}").fields} - set(keyword.kwlist)
