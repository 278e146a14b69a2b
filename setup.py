"""Only what pyproject.toml cannot say: the two C modules, both for the stable ABI.

pyengine._native is built by cffi in API mode; pyengine._front is what a program calls for each message (csrc/front).
"""

import glob
import os
import runpy
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

FRONT = ("module", "result", "lock", "session", "pending", "producer_front", "message", "read_queue")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
sanitize = SANITIZE if os.environ.get("PYENGINE_SANITIZE") == "address" else []


class BuildExt(build_ext):
    """Writes the types of the C module and of settings, which type checkers read, beside the modules."""

    def run(self) -> None:
        super().run()
        folder = self.get_finalized_command("build_py").get_package_dir("pyengine") if self.inplace else f"{self.build_lib}/pyengine"
        for name, text in (("_native", runpy.run_path("csrc/native_stub.py")["stub"]()), ("_settings", settings_stub())):
            with open(f"{folder}/{name}.pyi", "w", encoding="utf-8") as stub:
                stub.write(text)


def settings_stub() -> str:
    sys.path.insert(0, os.getcwd())
    from pyengine.engine_config import Keywords

    rows = [f"    {name}: {kind.__name__ if isinstance(kind, type) else kind}" for name, kind in Keywords.__annotations__.items()]
    return "\n".join(["# Made by the build from engine_config.py.", "import typing", "", "class Keywords(typing.TypedDict, total=False):",
                      *rows, ""])


class BuildPy(build_py):
    """Puts the pages of docs/, which help texts and messages name, into the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for page in glob.glob("docs/**/*.md", recursive=True):
                target = f"{self.build_lib}/pyengine/{page}"
                self.mkpath(os.path.dirname(target))
                self.copy_file(page, target)


setup(
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
    cffi_modules=["csrc/build_native.py:ffibuilder"],
    ext_modules=[
        Extension(
            "pyengine._front",
            [f"csrc/front/{name}.c" for name in FRONT],
            include_dirs=["csrc"],
            define_macros=[("Py_LIMITED_API", "0x030b0000")],
            py_limited_api=True,
            extra_compile_args=["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Wno-unused-parameter", *sanitize],  # callbacks of CPython
            extra_link_args=sanitize,
            depends=["csrc/front/front.h", *sorted(glob.glob("csrc/*.h"))],
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # one wheel for every Python from 3.11 on
)
