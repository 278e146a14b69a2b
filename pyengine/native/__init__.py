"""Thin modules over the C headers: they check arguments, call, raise.

Python never touches a shared field except through these: `struct.pack_into`
promises no memory order.
"""
