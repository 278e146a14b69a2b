"""A server that speaks S3 on the loopback: moto's, one for the whole run, with its buckets in memory."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from crash.replicas import free_port
from waiting import eventually

REGION, KEY, SECRET = "us-east-1", "tests", "of-this-project"
_numbers = itertools.count()


class Bucket:
    """A new bucket of the server at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        from pyarrow.fs import S3FileSystem

        self.endpoint = endpoint
        self.name = f"bucket-{next(_numbers)}"
        self.system = S3FileSystem(access_key=KEY, secret_key=SECRET, endpoint_override=endpoint, scheme="http", region=REGION,
                                   allow_bucket_creation=True)
        self.system.create_dir(self.name)

    @property
    def environment(self) -> dict[str, str]:
        """Return what a process needs to find the server by a plain s3:// URI."""
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION, "AWS_EC2_METADATA_DISABLED": "true",
                "AWS_ENDPOINT_URL": f"http://{self.endpoint}"}

    def uri(self, path: str) -> str:
        """A URI that says all of it, for processes that were started before."""
        return f"s3://{KEY}:{SECRET}@{self.name}/{path}?region={REGION}&scheme=http&endpoint_override={quote(self.endpoint, safe='')}"

    def upload(self, root: Path, to: str) -> None:
        """Put all files below `root` there."""
        for path in sorted(root.rglob("*")):
            if path.is_file():
                with self.system.open_output_stream(f"{self.name}/{to}/{path.relative_to(root)}") as stream:
                    stream.write(path.read_bytes())

    def objects(self, below: str) -> dict[str, int]:
        """Name -> length of the objects there, by their names below it."""
        from pyarrow.fs import FileSelector, FileType

        root = f"{self.name}/{below}"
        found = self.system.get_file_info(FileSelector(root, recursive=True, allow_not_found=True))
        return {info.path[len(root):].lstrip("/"): info.size for info in found if info.type == FileType.File}

    def read(self, name: str) -> bytes:
        with self.system.open_input_stream(f"{self.name}/{name}") as stream:
            return stream.read()

    def write(self, name: str, content: bytes) -> None:
        with self.system.open_output_stream(f"{self.name}/{name}") as stream:
            stream.write(content)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Its host:port."""
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: _answers(port), "the S3 server answers", timeout_s=60)
        assert server.poll() is None
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket, and what finds its server in the environment. Tests that use it carry the marker s3."""
    made = Bucket(s3_server)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made
