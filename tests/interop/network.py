"""Hosts on one machine: a network namespace for each, on a switch of their own, with cables that can be cut. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Host:
    """One host. Its processes are those that a thread starts while it is `inside()`."""

    def __init__(self, switch: str, name: str, number: int) -> None:
        self.address = f"10.77.0.{number}"
        self.switch, self.cable, self.namespace = switch, f"to{number}", f"{switch}-{name}"
        _ip("netns", "add", self.namespace)
        _ip("link", "add", self.cable, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        _ip("-n", switch, "link", "set", self.cable, "master", "bridge", "up")
        _ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", self.namespace, "link", "set", device, "up")

    @contextlib.contextmanager
    def inside(self) -> Iterator[Host]:
        """The calling thread, and each process that it starts, is on this host."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self.namespace}") as own:
            _enter(own.fileno())
            try:
                yield self
            finally:
                _enter(before.fileno())

    def cut(self) -> None:
        """Nothing reaches this host or comes from it, and nobody is told."""
        _ip("-n", self.switch, "link", "set", self.cable, "down")

    def join(self) -> None:
        _ip("-n", self.switch, "link", "set", self.cable, "up")


@contextlib.contextmanager
def network(*names: str) -> Iterator[dict[str, Host]]:
    """Hosts of these names; their namespaces end with the last process inside."""
    switch = f"pyengine{os.getpid()}"
    made = [switch]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        hosts = {}
        for number, name in enumerate(names, 1):
            made.append(f"{switch}-{name}")
            hosts[name] = Host(switch, name, number)
        yield hosts
    finally:
        for name in made:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
