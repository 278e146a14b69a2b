"""Thin modules over the C headers: each checks arguments, calls C, and raises what the return code means.

Python reads and writes shared fields through these modules only, because `struct.pack_into` promises no memory order.
"""
