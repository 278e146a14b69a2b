"""Host fields of a record: address bytes, then the port as 32 bits (section 5).

In Python a host is text, `1.2.3.4:10911` or `[2001:db8::1]:10911`.
"""

from __future__ import annotations

import functools
import socket
import struct

from pyengine.errors import FormatError, UsageError

HOST_V4_BYTES = 8
HOST_V6_BYTES = 20
_PORT = struct.Struct(">i")


@functools.lru_cache(maxsize=4096)
def encode_host(text: str) -> bytes:
    """Host text to 8 (IPv4) or 20 (IPv6) bytes; UsageError when it is no numeric address with a port."""
    address, colon, port_text = text.rpartition(":")
    try:
        port = int(port_text)
        if not colon or not 0 <= port <= 0x7FFFFFFF:
            raise ValueError("no port")
        if address.startswith("[") and address.endswith("]"):
            packed = socket.inet_pton(socket.AF_INET6, address[1:-1])
        else:
            packed = socket.inet_pton(socket.AF_INET, address)
    except (OSError, ValueError) as error:
        raise UsageError(f"{text!r} is no host: write 1.2.3.4:10911 or [2001:db8::1]:10911") from error
    return packed + _PORT.pack(port)


@functools.lru_cache(maxsize=4096)
def decode_host(data: bytes) -> str:
    """8 or 20 host bytes to text; FormatError for any other length."""
    if len(data) == HOST_V4_BYTES:
        return f"{data[0]}.{data[1]}.{data[2]}.{data[3]}:{_PORT.unpack_from(data, 4)[0]}"
    if len(data) == HOST_V6_BYTES:
        return f"[{socket.inet_ntop(socket.AF_INET6, data[:16])}]:{_PORT.unpack_from(data, 16)[0]}"
    raise FormatError(f"a host field has {HOST_V4_BYTES} or {HOST_V6_BYTES} bytes, not {len(data)}")
