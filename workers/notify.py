"""Readiness and watchdog for systemd; nothing happens outside it."""

from __future__ import annotations

import os


def notify(*lines: str) -> None:
    """Send `READY=1`, `WATCHDOG=1`, `STOPPING=1` or `STATUS=...` to the service manager, if there is one."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    import socket

    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.sendto("\n".join(lines).encode(), address)
        except OSError:
            pass  # the manager is gone: nobody to tell


def watchdog_interval_s() -> float | None:
    """Half the watchdog time that systemd gave this process, None without one."""
    if os.environ.get("WATCHDOG_PID") not in (None, str(os.getpid())):
        return None
    try:
        return int(os.environ["WATCHDOG_USEC"]) / 2e6
    except (KeyError, ValueError):
        return None
