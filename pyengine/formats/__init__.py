"""Encodes and decodes every file of the store, in pure Python with the standard library only.

This package is the oracle for the C code: both implement the same formats, and tests compare them. Sections named in the
docstrings are those of docs/formats.md (the byte tables of the RocketMQ 4.9 store).
"""
