"""Bytes <-> values of every file in the store. Pure Python, standard library only.

This package is the oracle for the C code: the same formats are coded twice on
purpose, and tests hold the two together. Sections named in the docstrings are
those of docs/formats.md (the byte tables of the RocketMQ 4.9 store).
"""
