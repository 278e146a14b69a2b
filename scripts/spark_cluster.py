"""The cluster of scripts/spark_cluster.sh: one master and its workers, as child processes of this one.

The pip package of Spark has no start scripts (sbin), so the classes are started through `spark-class`. All ports are
the kernel's choice and on the loopback address; where they are is read from the daemons' logs, whose form is set here.
A worker that is stopped stops its executors. Whatever ends this process, kill -9 too, ends the daemons: the kernel
tells them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

START_S = 120.0
STOP_S = 20.0
POLL_INTERVAL_S = 0.1
MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"
LOG4J = """\
rootLogger.level = info
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ClusterError(Exception):
    """The cluster did not start."""


class Daemon:
    """A master or worker; its log is a file."""

    def __init__(self, what: str, words: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.what = what
        self._log = folder / f"{what}.log"
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                                            start_new_session=True, preexec_fn=_end_with_parent)

    def await_line(self, pattern: str) -> re.Match[str]:
        """The first line of the log that matches; ClusterError if there is none in START_S."""
        deadline_s = time.monotonic() + START_S
        while True:
            has_ended = self.process.poll() is not None
            found = re.search(pattern, self._log.read_text(errors="replace"))
            if found:
                return found
            if has_ended or time.monotonic() > deadline_s:
                end = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
                raise ClusterError(f"the {self.what} {'ended' if has_ended else 'is not ready'}; its log ends:\n{end}")
            time.sleep(POLL_INTERVAL_S)

    def stop(self) -> None:
        """Ask it to end, and see to it that it does."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def cluster(workers: int = 2, cores: int = 1, memory: str = "1g", folder: Path | None = None) -> Iterator[str]:
    """Run a cluster for the length of a block, which gets the master's address.

    `cores` and `memory` are what each worker offers to executors. Logs and the executors' files go to `folder`, else to
    one that is removed at the end. ClusterError when it does not start.
    """
    with contextlib.ExitStack() as undo:
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="pyengine-spark-"))
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        environment = _environment(folder)
        spark_class = str(Path(environment["SPARK_HOME"], "bin", "spark-class"))
        loopback = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        master = Daemon("master", [spark_class, MASTER, *loopback], folder, environment)
        undo.callback(master.stop)
        url = master.await_line(r"Starting Spark master at (spark://\S+)")[1]
        started = []
        for number in range(1, workers + 1):
            work = folder / f"work-{number}"
            daemon = Daemon(f"worker-{number}", [spark_class, WORKER, *loopback, "--cores", str(cores), "--memory", memory,
                                                 "--work-dir", str(work), url], folder, environment)
            undo.callback(daemon.stop)
            started.append(daemon)
        for daemon in started:
            daemon.await_line("Successfully registered with master")
        yield url


def _environment(folder: Path) -> dict[str, str]:
    import pyspark

    settings = folder / "log4j2.properties"
    settings.write_text(LOG4J)
    options = (f"-Dlog4j2.configurationFile={settings.as_uri()} -Dspark.master.rest.enabled=false "
               f"{os.environ.get('SPARK_DAEMON_JAVA_OPTS', '')}")
    local = folder / "local"
    local.mkdir(exist_ok=True)
    return os.environ | {
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_PUBLIC_DNS": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(local),
        "SPARK_DAEMON_MEMORY": os.environ.get("SPARK_DAEMON_MEMORY", "512m"),
        "SPARK_DAEMON_JAVA_OPTS": options.strip(),
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
    }


def _end_with_parent() -> None:
    """In the child: be told to end when this process is gone, however it went."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run_command(words: list[str], url: str) -> int:
    """The command's exit code; a signal that ends it counts as a shell counts it."""
    with subprocess.Popen(words, env=os.environ | {"PYENGINE_SPARK_MASTER": url}) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the terminal has told the command too
            process.send_signal(signal.SIGINT)
            code = process.wait()
        except BaseException:
            process.terminate()
            raise
    return 128 - code if code < 0 else code


def main() -> int:
    parser = argparse.ArgumentParser(prog="spark_cluster.sh", description="A Spark standalone cluster on this host.")
    parser.add_argument("--workers", type=int, default=2, help="how many workers (default: 2)")
    parser.add_argument("--cores", type=int, default=1, help="cores that each offers (default: 1)")
    parser.add_argument("--memory", default="1g", help="memory that each offers (default: 1g)")
    parser.add_argument("--folder", type=Path, help="where logs and the workers' files go, and stay")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run; without it: until Ctrl-C")
    given = parser.parse_args()
    if given.workers < 1 or given.cores < 1:
        parser.error("give at least one worker and one core")
    words = given.command[1:] if given.command[:1] == ["--"] else given.command
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(128 + signal.SIGHUP))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with cluster(given.workers, given.cores, given.memory, given.folder) as url:
            if words:
                return run_command(words, url)
            print(f"master: {url}  (Ctrl-C stops it)\nexport PYENGINE_SPARK_MASTER={url}", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
            return 0
    except KeyboardInterrupt:
        return 130
    except (ClusterError, OSError) as error:
        print(f"spark_cluster.sh: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
