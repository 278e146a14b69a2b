"""What a process says to its service manager, beside log lines (log_file.py): readiness, watchdog, pauses between restarts."""

from __future__ import annotations

import os
import signal
import time

SHORT_LIFE_S = 10.0
RESTART_PAUSE_S = 5.0


def pause_before_restart(lived_s: float) -> None:
    """Wait a while before ending, for a process that ends soon after its start for want of room, descriptors or memory.

    The manager starts what has ended at once, and gives up on what ends again and again.
    """
    if not os.environ.get("NOTIFY_SOCKET") or lived_s >= SHORT_LIFE_S:
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # an order to stop does not wait
    notify(f"STATUS=cannot go on now, ends in {RESTART_PAUSE_S:g} s to be started again")
    time.sleep(RESTART_PAUSE_S)


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
            pass  # the manager is gone


def watchdog_interval_s() -> float | None:
    """Half the watchdog time that systemd gave this process, None without one."""
    if os.environ.get("WATCHDOG_PID") not in (None, str(os.getpid())):
        return None
    try:
        return int(os.environ["WATCHDOG_USEC"]) / 2e6
    except (KeyError, ValueError):
        return None
