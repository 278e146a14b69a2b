"""Only what pyproject.toml cannot say: the C module is built by cffi in API mode."""

from setuptools import setup

setup(cffi_modules=["csrc/build_native.py:ffibuilder"])
