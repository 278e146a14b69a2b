"""What a test may need beyond Python and a C compiler, and whether this machine has it.

A test says what it needs by a marker of the same name. A need that is absent skips the test with
the reason, unless PYENGINE_REQUIRE names it: then the test fails instead. NEEDS is the one table;
a new need is one row here and one marker in pyproject.toml.

    python3 tests/needs.py NAME...    prints those of them that are met, joined by commas; the standard library will do
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

JAVA_OLDEST = 17


@dataclass(frozen=True)
class Need:
    """`absent()` gives the reason why the need is not met, or None."""

    name: str
    absent: Callable[[], str | None]


def java_command() -> str | None:
    """The `java` that tests start: of JAVA_HOME, else on PATH."""
    home = os.environ.get("JAVA_HOME")
    if home and os.access(Path(home, "bin", "java"), os.X_OK):
        return str(Path(home, "bin", "java"))
    return shutil.which("java")


@functools.cache
def java_version() -> int | None:
    """Major version of `java_command()`, None without one that starts."""
    command = java_command()
    if command is None:
        return None
    told = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=60)
    found = re.search(r'version "(\d+)', told.stderr + told.stdout)
    return int(found.group(1)) if told.returncode == 0 and found else None


def _no_java() -> str | None:
    version = java_version()
    if version is None:
        return "no Java was found (JAVA_HOME, PATH)"
    return None if version >= JAVA_OLDEST else f"Java {version} is older than {JAVA_OLDEST}"


def _no_maven() -> str | None:
    missing = [name for name in ("mvn", "javac") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found on PATH" if missing else None


def _no_root() -> str | None:
    return None if os.geteuid() == 0 else "not root"


def _no_network() -> str | None:
    if _no_root():
        return "not root"
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found on PATH (packages iproute2, util-linux)"
    made = subprocess.run(["unshare", "--net", "ip", "link", "add", "type", "veth"], capture_output=True, text=True, timeout=60)
    return f"no network namespace with cables: {made.stderr.strip()}" if made.returncode else None


def _no_block() -> str | None:
    if _no_root():
        return "not root"
    missing = [name for name in ("mkfs.ext4", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found on PATH (packages e2fsprogs, util-linux)"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=60).returncode:
        return "nothing may be mounted"
    if not {"\tfuse", "\text4"} <= {line.removeprefix("nodev") for line in Path("/proc/filesystems").read_text().splitlines()}:
        return "the kernel does not know fuse and ext4"
    if not Path("/usr/include/linux/fuse.h").exists():
        return "<linux/fuse.h> not found (package linux-libc-dev)"
    return _no_devices()


def _no_devices() -> str | None:
    """Tried, because a container may see them and still not be let."""
    from faults.loop_device import loop_device

    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"no FUSE: {error}"
    image = os.memfd_create("needs")
    try:
        os.ftruncate(image, 1 << 20)
        with loop_device(image):
            return None
    except OSError as error:
        return f"no loop device: {error}"
    finally:
        os.close(image)


def _no_systemd() -> str | None:
    if _no_root():
        return "not root"
    if not any(Path(place).exists() for place in ("/usr/lib/systemd/systemd", "/lib/systemd/systemd")):
        return "systemd is not installed"
    for place in (Path(sys.prefix), Path(__file__)):
        if place.is_relative_to("/tmp") or place.is_relative_to("/var/tmp"):
            return f"{place} is below a temporary folder, which the units do not see (PrivateTmp)"
    return None if shutil.which("unshare") else "unshare not found (package util-linux)"


def _no_spark() -> str | None:
    missing = [name for name in ("pyspark", "pyarrow", "pandas") if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed (extra `spark`)" if missing else _no_java()


def _no_connect() -> str | None:
    missing = [name for name in ("grpc", "grpc_status", "zstandard") if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed (pip install 'pyspark[connect]')" if missing else _no_spark()


def _no_s3() -> str | None:
    missing = [name for name in ("pyarrow", "moto", "flask", "flask_cors") if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed (extra `test`)" if missing else None


def _no_griffe() -> str | None:
    return None if importlib.util.find_spec("griffe") else "griffe not installed (extra `docs`)"


def pyright_command() -> str | None:
    """The `pyright` that a test starts, or `basedpyright`, whose package needs no further download."""
    return shutil.which("pyright") or shutil.which("basedpyright")


def _no_pyright() -> str | None:
    return None if pyright_command() else "pyright not found on PATH (package pyright or basedpyright)"


def _no_mypy() -> str | None:
    return None if importlib.util.find_spec("mypy") else "mypy not installed (extra `lint`)"


def _no_btrfs() -> str | None:
    return None if shutil.which("mkfs.btrfs") else "mkfs.btrfs not found on PATH (package btrfs-progs)"


def _no_go() -> str | None:
    return None if shutil.which("go") else "go not found on PATH"


def _no_node() -> str | None:
    return None if shutil.which("npm") else "npm not found on PATH"


def _no_arm() -> str | None:
    missing = [name for name in ("aarch64-linux-gnu-gcc", "qemu-aarch64") if shutil.which(name) is None]
    packages = "packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user"
    return f"{' and '.join(missing)} not found on PATH ({packages})" if missing else None


def _no_promtool() -> str | None:
    return None if shutil.which("promtool") else "promtool (of Prometheus) not found on PATH"


NEEDS = {
    need.name: need
    for need in (
        Need("java", functools.cache(_no_java)),
        Need("maven", functools.cache(_no_maven)),
        Need("root", functools.cache(_no_root)),
        Need("network", functools.cache(_no_network)),
        Need("block", functools.cache(_no_block)),
        Need("systemd", functools.cache(_no_systemd)),
        Need("spark", functools.cache(_no_spark)),
        Need("connect", functools.cache(_no_connect)),
        Need("s3", functools.cache(_no_s3)),
        Need("griffe", functools.cache(_no_griffe)),
        Need("mypy", functools.cache(_no_mypy)),
        Need("pyright", functools.cache(_no_pyright)),
        Need("go", functools.cache(_no_go)),
        Need("node", functools.cache(_no_node)),
        Need("btrfs", functools.cache(_no_btrfs)),
        Need("arm", functools.cache(_no_arm)),
        Need("promtool", functools.cache(_no_promtool)),
    )
}


FORMS = ("ci", "long")  # markers of what runs only where it is asked for


def required_needs() -> frozenset[str]:
    """The needs that PYENGINE_REQUIRE names; ValueError for a name that is no need."""
    names = frozenset(os.environ.get("PYENGINE_REQUIRE", "").replace(",", " ").split())
    unknown = names - NEEDS.keys() - set(FORMS)
    if unknown:
        known = ", ".join([*NEEDS, *FORMS])
        raise ValueError(f"PYENGINE_REQUIRE names {', '.join(sorted(unknown))}; known are {known}")
    return names


if __name__ == "__main__":
    print(",".join(name for name in sys.argv[1:] if NEEDS[name].absent() is None))
