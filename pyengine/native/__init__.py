"""One thin module per C header: checks arguments, calls, raises.

Python never touches a shared field except through these: `struct.pack_into`
promises no memory order.
"""
