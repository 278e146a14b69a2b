"""Bytes to values and back. Pure Python, standard library only: the oracle for the C code."""
