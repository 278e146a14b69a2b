"""A reader beside a process that appends and deletes: what it is given is always whole, in order, and below the end."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

from fix_store_builder import StoreBuilder
from pyengine.results import GetStatus
from pyengine.storage.store_reader import StoreReader
from waiting import scaled_timeout_s

TESTS = Path(__file__).parents[1]
MESSAGES = 3000
KEPT_SEGMENTS = 8
DEADLINE_S = 60

WRITER = """
import hashlib, os, random, sys
from fix_store_builder import StoreBuilder

root, seed, messages, kept = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rng = random.Random(seed)
builder = StoreBuilder(__import__("pathlib").Path(root))
for number in range(messages):
    body = rng.randbytes(rng.randrange(200))
    builder.put("T", hashlib.sha256(body).digest() + body)
    segments = sorted(builder.paths.commit_log.iterdir())
    while len(segments) > kept:
        oldest = segments.pop(0)
        descriptor = os.open(oldest, os.O_RDWR)
        oldest.unlink()  # first the name, then the bytes: mappings of it read zeros from now on
        for at in range(0, 4096, 512):
            os.pwrite(descriptor, bytes(512), at)
        os.close(descriptor)
    print(number, flush=True) if number % 500 == 0 else None
"""


def test_reading_while_another_process_appends_and_deletes(tmp_path, seed):
    root = tmp_path / "store"
    StoreBuilder(root)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), seed, str(MESSAGES), str(KEPT_SEGMENTS)],
        env={"PYTHONPATH": f"{TESTS}:{TESTS.parent}"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )
    print(f"seed {seed}")
    statuses: dict[GetStatus, int] = {}
    offset, last, read, jumps = 0, -1, 0, 0
    deadline_s = time.monotonic() + scaled_timeout_s(DEADLINE_S)
    try:
        with StoreReader(root, mapped_file_size_commit_log_bytes=4096, mapped_file_size_consume_queue_bytes=200) as store:
            while offset < MESSAGES:
                assert time.monotonic() < deadline_s, f"at {offset}: {statuses}"
                assert writer.poll() in (None, 0), writer.stderr.read()
                # The slow reader falls behind the deletion, the fast one meets the end.
                result = store.get_message("T", 0, offset, 1 + read % 5)
                statuses[result.status] = statuses.get(result.status, 0) + 1
                for message in result.messages:
                    assert hashlib.sha256(message.body[32:]).digest() == message.body[:32]
                    assert message.queue_offset > last
                    jumps += message.queue_offset != last + 1
                    last = message.queue_offset
                    read += 1
                if read % 100 == 50 and result.messages:
                    time.sleep(0.003)
                assert result.next_begin_offset >= offset or result.status is GetStatus.OFFSET_OVERFLOW_BADLY
                offset = result.next_begin_offset
    finally:
        writer.kill()
        writer.communicate()
    print(f"read {read} of {MESSAGES}, {jumps} jumps over deleted ones, {statuses}")
    assert read > 100
    assert statuses[GetStatus.FOUND] > 0
    assert GetStatus.OFFSET_TOO_SMALL in statuses or GetStatus.MESSAGE_WAS_REMOVING in statuses
    assert GetStatus.OFFSET_FOUND_NULL not in statuses and GetStatus.NO_MATCHED_MESSAGE not in statuses
