"""A durable message log for one host, in the file format of the RocketMQ 4.9 store.

    with pyengine.Engine(path) as engine: ...        # embedded: workers as children
    with pyengine.connect(path) as producer: ...     # one producer of a running engine
    with pyengine.consume(path, topic, group="g") as consumer: ...   # one member of a consumer group
    with pyengine.open_store(path) as store: ...     # read-only, needs no engine

Names are loaded when they are first used, so that `import pyengine` costs little
and Spark's executors import only what they read with.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyengine import arrow as arrow
    from pyengine.client.backup import BackupReport, RestoreReport, backup_store, restore_store
    from pyengine.client.consumer import ConsumeOptions, Consumer, consume
    from pyengine.client.consumer_groups import ConsumerGroups, GroupState, QueueLag, Start
    from pyengine.client.half_messages import Outcome
    from pyengine.client.handler import run_consumer, run_consumer_async
    from pyengine.client.outgoing import BatchMessage, RawMessage
    from pyengine.client.pending_puts import PutFuture
    from pyengine.client.producer import ConnectOptions, Producer, connect
    from pyengine.client.retries import DeadLetterQueue, DeadLetters
    from pyengine.client.tables import TablesReport, TopicsFailedError, write_tables
    from pyengine.client.topics import Codec, Topic, Topics, TopicState, Typed, TypedConsumer
    from pyengine.client.transactions import Checker, Transaction
    from pyengine.engine.embedded import Engine
    from pyengine.engine_config import EngineSettings
    from pyengine.errors import (
        BadMessageError,
        ConfigError,
        CorruptionError,
        DegradedError,
        DiskError,
        DiskFullError,
        EngineError,
        EngineUnavailableError,
        ExitCode,
        FlushError,
        FormatError,
        InvariantError,
        NotAStoreError,
        StoreBusyError,
        StoreRefusedError,
        UsageError,
    )
    from pyengine.formats.record import Message
    from pyengine.ipc.live_reader import LiveStoreReader, open_store
    from pyengine.results import (
        GetResult,
        GetStatus,
        PutError,
        PutIndeterminateError,
        PutManyResult,
        PutNotDurableError,
        PutRefusedError,
        PutResult,
        PutStatus,
        ReadLevel,
    )
    from pyengine.storage.config import EngineConfig, load_config
    from pyengine.storage.config_table import TopicConfig
    from pyengine.storage.store_reader import ScanChoice, StoreReader

__version__ = "0.3.0.dev0"

_WHERE = {name: f"pyengine.{module}" for module, names in {
    "client.backup": "BackupReport RestoreReport backup_store restore_store",
    "client.consumer": "ConsumeOptions Consumer consume",
    "client.consumer_groups": "ConsumerGroups GroupState QueueLag Start",
    "client.half_messages": "Outcome",
    "client.handler": "run_consumer run_consumer_async",
    "client.outgoing": "BatchMessage RawMessage",
    "client.pending_puts": "PutFuture",
    "client.producer": "ConnectOptions Producer connect",
    "client.retries": "DeadLetterQueue DeadLetters",
    "client.tables": "TablesReport TopicsFailedError write_tables",
    "client.topics": "Codec Topic TopicState Topics Typed TypedConsumer",
    "client.transactions": "Checker Transaction",
    "engine.embedded": "Engine",
    "engine_config": "EngineSettings",
    "errors": "BadMessageError ConfigError CorruptionError DegradedError DiskError DiskFullError EngineError EngineUnavailableError "
              "ExitCode FlushError FormatError InvariantError NotAStoreError StoreBusyError StoreRefusedError UsageError",
    "formats.record": "Message",
    "ipc.live_reader": "LiveStoreReader open_store",
    "results": "GetResult GetStatus PutError PutIndeterminateError PutManyResult PutNotDurableError PutRefusedError PutResult PutStatus "
               "ReadLevel",
    "storage.config": "EngineConfig load_config",
    "storage.config_table": "TopicConfig",
    "storage.store_reader": "ScanChoice StoreReader",
}.items() for name in names.split()}
_SUBMODULES = ("arrow",)  # those that a program uses by `import pyengine` alone

__all__ = [
    "BackupReport", "BadMessageError", "BatchMessage", "Checker", "Codec", "ConfigError", "ConnectOptions",
    "ConsumeOptions", "Consumer", "ConsumerGroups", "CorruptionError", "DeadLetterQueue", "DeadLetters",
    "DegradedError", "DiskError", "DiskFullError", "Engine", "EngineConfig", "EngineError", "EngineSettings",
    "EngineUnavailableError", "ExitCode", "FlushError", "FormatError", "GetResult", "GetStatus", "GroupState",
    "InvariantError", "LiveStoreReader", "Message", "NotAStoreError", "Outcome", "Producer", "PutError", "PutFuture",
    "PutIndeterminateError", "PutManyResult", "PutNotDurableError", "PutRefusedError", "PutResult", "PutStatus",
    "QueueLag", "RawMessage", "ReadLevel", "RestoreReport", "ScanChoice", "Start", "StoreBusyError", "StoreReader",
    "StoreRefusedError", "TablesReport", "Topic", "TopicConfig", "TopicState", "Topics", "TopicsFailedError",
    "Transaction", "Typed", "TypedConsumer", "UsageError", "__version__", "backup_store", "connect", "consume",
    "load_config", "open_store", "restore_store", "run_consumer", "run_consumer_async", "write_tables",
]


if not TYPE_CHECKING:  # with it type checkers would take every name for one of the module

    def __getattr__(name: str) -> object:
        module = _WHERE.get(name)
        if name in _SUBMODULES:
            return import_module(f"pyengine.{name}")
        if module is None:
            raise AttributeError(f"module 'pyengine' has no attribute {name!r}")
        value = getattr(import_module(module), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
