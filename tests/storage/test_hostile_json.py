"""Documents that somebody made up, in every small file: told, or taken for damaged; never a traceback."""

from __future__ import annotations

import pytest

from pyengine.errors import EngineError
from pyengine.ipc.engine_id import read_engine_id
from pyengine.ipc.shared_objects import find_folder
from pyengine.config import load_config
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.cut_log import read_cut
from pyengine.storage.delay_offset import DelayOffsets
from pyengine.storage.rebuild_marker import read_rebuild_marker
from pyengine.storage.recovery_marker import read_marker
from pyengine.storage.topic_config import TopicConfigs
from pyengine.storage.watermark import read_watermark

TEXTS = (
    b"[" * 100_000, b'{"a":' * 50_000, b"1e999", b'{"offsetTable":{1:1e999}}', b'{"topicConfigTable":{"T":{"writeQueueNums":1e400}}}',
    b'{"uuid":1e999,"device":1e999,"inode":1e999}', b'{"flushed":1e999,"epoch":1e999,"uuid":"x"}', b'{"path":"normal","scan_from":1e999}',
    b'{"at":1e999,"end":1e999,"reason":"","kept":1}', b'{"shm_directory":1e999}', b"a=" + b"[" * 50_000,
)
READERS = {
    "consumerOffset.json": lambda root: ConsumerOffsets(root).groups(),
    "delayOffset.json": lambda root: DelayOffsets(root).read(),
    "topics.json": lambda root: TopicConfigs(root).read(),
    "watermark": read_watermark,
    "recovery": read_marker,
    "rebuild": read_rebuild_marker,
    "cut": read_cut,
    "engine-id": read_engine_id,
    "engine-run": find_folder,
    "engine.toml": lambda root: load_config(root, environ={}),
}


@pytest.mark.parametrize("name", READERS)
def test_a_made_up_document_is_told_or_taken_for_damaged(tmp_path, name):
    (tmp_path / "config").mkdir()
    (tmp_path / "commitlog").mkdir()
    for text in TEXTS:
        (tmp_path / "config" / name).write_bytes(text)
        try:
            READERS[name](tmp_path)
        except EngineError as error:
            assert str(error), text[:40]
