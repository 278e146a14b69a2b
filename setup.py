"""Only what pyproject.toml cannot say: the C module is built by cffi in API mode, for the stable ABI."""

from setuptools import setup

setup(
    cffi_modules=["csrc/build_native.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # one wheel for every Python from 3.11 on
)
