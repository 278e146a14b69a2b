"""The sources of settings: `config/engine.toml`, then environment `PYENGINE_*`, then `--set`; later ones take precedence.

`load_config(root)` reads all sources and returns an EngineConfig, which has the origin
of each value. A store's file sizes are fixed at its creation: they are in its
engine.toml or, for a store that RocketMQ made, are derived from its files; other
values for them are refused. Only `record_sizes`, `set_in_file` and `set_durably` write.

Names: RocketMQ's in snake_case with the unit appended, or RocketMQ's own camelCase
key (with `mapedFile...` or `mappedFile...`). Case, `_`, `-` and `.` are ignored,
so `PYENGINE_FLUSH_DISK_TYPE` and `flushDiskType` are the same setting.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyengine.engine_config import FIXED_NAMES, KEPT_NAMES, SETTINGS, EngineConfig
from pyengine.errors import ConfigError, EngineError, NotAStoreError, command, disk_errors, passing
from pyengine.formats.paths import PATH_SEPARATOR, LogFolders, folders_of, log_folders, parse_segment_name, set_log_folders
from pyengine.formats.small_file import read_small_text
from pyengine.settings import Value
from pyengine.storage.file_system import refuse_folders_of_others, refuse_links

__all__ = [
    "EngineConfig", "SETTINGS", "FIXED_NAMES", "check_keywords", "config_path", "record_sizes", "load_config", "parse_set", "setting_name",
]

LOG_PATHS = ("store_path_commit_log", "read_only_commit_log_store_paths")
ENV_PREFIX = "PYENGINE_"
NAME_SERVERS_VARIABLE = "NAMESRV_ADDR"  # of RocketMQ, which its tools and clients read too: it counts for a gateway without namesrv_addr
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")
_LINK_NAME = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)$")
DEFAULT, FILES, FILE, ENVIRONMENT, SET = "default", "files", "engine.toml", "environment", "--set"
LIVE = "live"  # set by `pyengine config set` since the engine was started
SCANNED = ("config", "commitlog", "consumequeue", "consumequeue_ext", "index"), ("quarantine",)  # for links that root must not follow
STORE_SIGNS = ("commitlog", "consumequeue", "checkpoint", "config/engine.toml", "config/engine-id")  # a store has one of these

# RocketMQ keys that this engine does not support: the value that holds here ("": none can be given), and why there is no other.
REFUSED_KEYS = {
    "storePathRootDir": ("", "the store is the directory that the command names"),
    "duplicationEnable": ("false", "this engine has no duplication mode"),
    "enableDLegerCommitLog": ("false", "this engine does not speak the raft protocol"),
    "brokerPermission": ("6", "give topics their rights (mqadmin updateTopicPerm), or use wipeWritePerm"),
    "disableConsumeIfConsumerReadSlowly": ("false", "a slow consumer is served like the others"),
    "enablePropertyFilter": ("true", "conditions in SQL92 always work"),
    "brokerIP1": ("", "gateway_advertised_host decides it, at a start"),
    "listenPort": ("", "gateway_broker_port decides it, at a start"),
    "longPollingEnable": ("true", "a pull is held for as long as its client asks"),
    "messageStorePlugIn": ("", "the engine has no plug-ins"),
    "notifyConsumerIdsChangedEnable": ("true", "it is a setting of each group: mqadmin updateSubGroup"),
    "rejectTransactionMessage": ("false", "transactions are always taken"),
    "storeReplyMessageEnable": ("true", "replies are always stored"),
    "traceOn": ("true", "clients decide whether they send traces"),
    "traceTopicEnable": ("false", "the topic of traces is a topic like others"),
    "useTLS": ("false", "gateway_tls_mode decides it, at a start"),
}
# Settings of RocketMQ's store that may be given and change nothing here, by the reason.
_INERT = {
    "a put on an idle store is committed at once, a stream of them in pieces of up to a millisecond":
        "commitCommitLogLeastPages commitCommitLogThoroughInterval",
    "each round syncs every queue file that was touched since the last": "flushConsumeQueueLeastPages flushConsumeQueueThoroughInterval",
    "extension units are written without a filter map; a map that a unit has is kept": "bitMapLengthConsumeQueueExt",
    "recovery always respects the index's time in the checkpoint": "messageIndexSafe",
    "a query says itself how many messages it wants, 64 if it does not": "defaultQueryMaxNum maxMsgsNumBatch",
    "the flusher sleeps on a latch and loops while there is work": "flushCommitLogTimed",
    "the flusher follows the position itself, and every flush takes every byte": "flushCommitLogLeastPages flushCommitLogThoroughInterval",
    "segments are allocated, not written, ahead of use": "flushLeastPagesWhenWarmMapedFile",
    "one process appends: no lock": "useReentrantLockWhenPutMessage debugLockEnable",
    "an exhausted pool waits, bounded by put_timeout_ms": "fastFailIfNoBufferInStorePool",
    "readers always correct offsets": "offsetCheckInSlave",
    "readers do not report to the engine": "diskFallRecorded",
    "delayed messages are counted like others, by topic": "enableScheduleMessageStats",
    "each level is delivered in order, one message after the other":
        "enableScheduleAsyncDeliver scheduleAsyncDeliverMaxPendingLimit scheduleAsyncDeliverMaxResendNum2Blocked",
    "RocketMQ does not use it either": "putMsgIndexHightWater",
}
# Further keys of RocketMQ's broker, which change nothing here, by the reason.
_UNUSED = {
    "the gateway serves its clients from one loop and a few threads, without such pools and queues":
        "adminBrokerThreadPoolNums clientManageThreadPoolNums clientManagerThreadPoolQueueCapacity consumerManageThreadPoolNums "
        "consumerManagerThreadPoolQueueCapacity endTransactionPoolQueueCapacity endTransactionThreadPoolNums heartbeatThreadPoolNums "
        "heartbeatThreadPoolQueueCapacity processReplyMessageThreadPoolNums pullMessageThreadPoolNums pullThreadPoolQueueCapacity "
        "putMessageFutureThreadPoolNums putThreadPoolQueueCapacity queryMessageThreadPoolNums queryThreadPoolQueueCapacity "
        "replyThreadPoolQueueCapacity sendMessageThreadPoolNums sendThreadPoolQueueCapacity brokerFastFailureEnable "
        "waitTimeMillsInHeartbeatQueue waitTimeMillsInPullQueue waitTimeMillsInSendQueue waitTimeMillsInTransactionQueue "
        "serverAsyncSemaphoreValue serverCallbackExecutorThreads serverOnewaySemaphoreValue serverPooledByteBufAllocatorEnable "
        "serverSelectorThreads serverWorkerThreads useEpollNativeSelector transferMsgByHeap",
    "the gateway's limits of clients count: gateway_idle_timeout_ms, gateway_connection_max_bytes and the like":
        "serverChannelMaxIdleTimeSeconds serverSocketBacklog serverSocketRcvBufSize serverSocketSndBufSize writeBufferHighWaterMark "
        "writeBufferLowWaterMark",
    "the gateway registers each 30 s and after each change, in full, with the name servers of namesrvAddr":
        "brokerIP2 fetchNamesrvAddrByAddressServer compressedRegister forceRegister registerBrokerTimeoutMills registerNameServerPeriod",
    "the gateway opens no connections to other brokers, and one to each name server":
        "channelNotActiveInterval clientAsyncSemaphoreValue clientCallbackExecutorThreads "
        "clientChannelMaxIdleTimeSeconds clientCloseSocketIfTimeout clientOnewaySemaphoreValue clientPooledByteBufAllocatorEnable "
        "clientSocketRcvBufSize clientSocketSndBufSize clientWorkerThreads connectTimeoutMillis",
    "conditions in SQL92 are evaluated on the messages, without filter servers and Bloom filters":
        "enableCalcFilterBitMap expectConsumerNumUseFilter filterDataCleanTimeSpan filterServerNums filterSupportRetry "
        "maxErrorRateOfBloomFilter",
    "the engine has its own statistics":
        "autoDeleteUnusedStats commercialBaseCount commercialBigCount commercialEnable commercialTimerCount commercialTransCount "
        "enableDetailStat",
    "the gateway writes offsets every 5 s, without a history": "flushConsumerOffsetHistoryInterval flushConsumerOffsetInterval",
    "pulls are held until a message is dispatched": "shortPollingTimeMills",
    "the topics of broker and cluster always exist": "brokerTopicEnable clusterTopicEnable",
    "there is no DLedger": "dLegerGroup dLegerPeers dLegerSelfId isEnableBatchPush preferredLeaderId storePathDLedgerCommitLog",
    "RocketMQ 4.9 does not use it either, or not in a store": "consumerFallbehindThreshold highSpeedMode isolateLogEnable maxDelayTime "
        "msgTraceTopicName regionId rocketmqHome startAcceptSendRequestTimeStamp",
}
INERT_KEYS = {key: why for why, keys in _INERT.items() for key in keys.split()}
UNUSED_KEYS = INERT_KEYS | {key: why for why, keys in _UNUSED.items() for key in keys.split()}


def fold(key: str) -> str:
    """Return the form in which names are compared: `mapedFileSizeCommitLog` and `MAPPED_FILE_SIZE_COMMIT_LOG` become equal."""
    for mark in "_-.":
        key = key.replace(mark, "")
    return key.lower().replace("mapedfile", "mappedfile")


_NAMES = {fold(spelling): name for name, row in SETTINGS.items() for spelling in (name, row.key) if spelling}
_NAMES[fold("file_reserved_time_h")] = "file_reserved_time_hours"  # its name in the first version, which files may have
_INERT_NAMES = frozenset(map(fold, INERT_KEYS))
_REFUSED = {fold(key): (key, why) for key, why in ({key: why for key, (_, why) in REFUSED_KEYS.items()} | UNUSED_KEYS).items()}


def is_inert(key: str) -> bool:
    """Return whether the key may be given without effect: one of INERT_KEYS, also in snake_case with its unit, as files may have it."""
    return _without_unit(key) in _INERT_NAMES


def _without_unit(key: str) -> str:
    return fold(key).removesuffix("ms").replace("numtoblocked", "num2blocked")


def setting_name(key: str, where: str) -> str:
    """Return the setting that `key` means; ConfigError, with the nearest name of a setting, if there is none."""
    folded = _without_unit(key) if is_inert(key) else fold(key)
    if folded in _NAMES:
        return _NAMES[folded]
    if folded in _REFUSED:
        spelling, why = _REFUSED[folded]
        raise ConfigError(f"{spelling} ({where}) {'has no effect here' if spelling in INERT_KEYS else 'cannot be set'}: {why}")
    near = nearest_name(folded)
    hint = f"did you mean {near}?" if near else "`pyengine config explain` lists all settings"
    raise ConfigError(f"unknown setting {key!r} ({where}): {hint}")


def nearest_name(folded: str, cutoff: float = 0.6) -> str | None:
    """Return the setting with the nearest spelling, or None if none is near."""
    from difflib import get_close_matches

    near = get_close_matches(folded, _NAMES, n=1, cutoff=cutoff)
    return _NAMES[near[0]] if near else None


def check_keywords(call: Callable[..., object], settings: Mapping[str, object], *inner: Callable[..., object]) -> None:
    """Check settings that a program passes to `call`, which passes them on to `inner`, by keyword.

    ConfigError for a wrong value, and for an unknown name, with the nearest argument of the calls or else the nearest setting.
    """
    where = f"{call.__name__}()"
    for key, value in settings.items():
        if is_inert(key):
            continue
        if fold(key) not in _NAMES and fold(key) not in _REFUSED:
            raise _unknown_keyword(key, where, (call, *inner))
        SETTINGS[setting_name(key, where)].read(value, where)


def _unknown_keyword(key: str, where: str, calls: Iterable[Callable[..., object]]) -> ConfigError:
    """Return the error for a keyword that is neither an argument of the calls nor a setting."""
    import inspect
    from difflib import get_close_matches

    own = {fold(name): name for call in calls
           for name, one in inspect.signature(call).parameters.items() if one.kind is not one.VAR_KEYWORD}
    for near in get_close_matches(fold(key), [*own, *_NAMES], n=1):
        if near in own:
            return ConfigError(f"{where} has no argument {key!r}: did you mean {own[near]}?")
        return ConfigError(f"unknown setting {key!r} ({where}): did you mean {_NAMES[near]}?")
    names = "".join(f"{name}, " for name in own.values())
    return ConfigError(f"{where} has no argument {key!r}: it has {names and f'{names}and '}the settings that `pyengine config explain` "
                       "lists")


def parse_set(pairs: tuple[str, ...] | list[str], where: str = "--set") -> dict[str, str]:
    """Return the `key=value` texts of --set (or of `where`) as a mapping; the last value of a repeated key counts."""
    overrides = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{where} {pair}: give key=value")
        overrides[key.strip()] = value.strip()
    return overrides


def checked_set(pairs: tuple[str, ...] | list[str]) -> dict[str, str]:
    """Return the texts of --set; ConfigError for an unknown name and for a value that is not allowed."""
    settings = {key: value for key, value in parse_set(pairs).items() if not is_inert(key)}
    for key, value in settings.items():
        SETTINGS[setting_name(key, SET)].read(value, SET)
    return settings


def set_arguments(settings: Mapping[str, object]) -> list[str]:
    """Return the command-line words for these settings: the inverse of parse_set()."""
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def existing_store(root: Path) -> Path:
    """Return `root` if it holds a store, without opening it; NotAStoreError says what is there instead, DiskError why it is not known."""
    with disk_errors("open", root):
        exists = root.exists()
        if root.is_dir():
            os.stat(root / ".")  # without the right to enter it no sign of a store would be found
    if not exists:
        raise passing(NotAStoreError(f"{root.absolute()} does not exist: check the path; {command('start', root)} makes a new store"))
    if not root.is_dir():
        raise NotAStoreError(f"{root} is a file; STORE is the store's root directory")
    if not any(os.path.lexists(root / sign) for sign in STORE_SIGNS):  # a link may lead to a disk that is not mounted
        hint = f"; did you mean {root.parent}?" if root.name in ("commitlog", "consumequeue", "index", "config") else ""
        missing = NotAStoreError(f"{root} holds no store: there is no commitlog folder in it{hint}")
        raise missing if hint else passing(missing)  # an engine makes one in an empty folder
    refuse_links(root, *SCANNED)
    return root


def config_path(root: str | os.PathLike[str]) -> Path:
    """Return the path of a store's settings file."""
    return Path(root) / "config" / "engine.toml"


def load_config(
    root: str | os.PathLike[str] | None,
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> EngineConfig:
    """Return the settings of the store at `root`, which need not exist (None: of a new store).

    `overrides` are `--set` values, as text or typed. ConfigError.
    """
    if root is not None:
        refuse_links(root, *SCANNED)
    from_file = {} if root is None else read_file(config_path(root))
    asked: dict[str, tuple[Value, str]] = {}
    for name, value in from_environment(os.environ if environ is None else environ).items():
        asked[name] = value, ENVIRONMENT
    for key, given in (overrides or {}).items():
        if is_inert(key):
            continue
        name = setting_name(key, SET)
        asked[name] = SETTINGS[name].read(given, SET), SET

    if root is not None and not asked.keys().isdisjoint(LOG_PATHS):
        given = from_file | {name: value for name, (value, _) in asked.items()}
        _refuse_lost_segments(root, named_log_folders(root, from_file), named_log_folders(root, given))
        set_log_folders(root, *(str(given.get(name, "")) for name in LOG_PATHS))  # the sizes are derived from the files there
    elif root is not None and not from_file.keys().isdisjoint(LOG_PATHS):
        refuse_folders_of_others(root, log_folders(root).all)
    values = {name: (value, FILE) for name, value in from_file.items()}
    if root is not None:
        values |= _sizes_from_files(root, from_file, asked)
    for name, (value, where) in asked.items():
        if name not in FIXED_NAMES or name not in values:
            values[name] = value, where
        elif value != values[name][0]:
            there, origin = values[name]
            says = "its config/engine.toml says" if origin == FILE else "its files have"
            raise ConfigError(
                f"{name} = {value} ({where}) does not fit this store: it is fixed at creation and {says} {there}; "
                f"leave it out, or make a new store")
    from_rocketmq = (os.environ if environ is None else environ).get(NAME_SERVERS_VARIABLE, "")
    if from_rocketmq and "namesrv_addr" not in values and values.get("gateway_enable", (False,))[0]:
        values["namesrv_addr"] = from_rocketmq, ENVIRONMENT
    given_values: dict[str, Any] = {name: value for name, (value, _) in values.items()}  # EngineConfig checks each value
    return EngineConfig(**given_values, origins={name: where for name, (_, where) in values.items()})


def read_file(path: Path) -> dict[str, Value]:
    """Return the settings in an engine.toml; empty if there is no such file. Keys are flat: a table is refused."""
    try:
        text = read_small_text(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error
    return read_text(text, path)


def read_text(text: str, path: Path) -> dict[str, Value]:
    """Return the settings in the text of an engine.toml; a ConfigError names `path`."""
    import tomllib

    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or a number of more digits than int() takes
        raise ConfigError(f"{path} is not valid TOML: {error}: put words, and numbers with a unit, in quotes") from error
    values: dict[str, Value] = {}
    for key, value in document.items():
        if isinstance(value, (dict, list)):
            kind = "table" if isinstance(value, dict) else "list"
            raise ConfigError(f"{path}: {key} is a {kind}; settings are key = value")
        if is_inert(key):
            continue
        name = setting_name(key, path.name)
        if name in values:
            raise ConfigError(f"{path}: {name} is there twice (once as {key})")
        values[name] = SETTINGS[name].read(value, path.name)
    return values


def record_sizes(root: str | os.PathLike[str], config: EngineConfig) -> bool:
    """Write to config/engine.toml the settings without which the store's files cannot be read; True if it wrote.

    These are the sizes, unless the file has them, and the settings of KEPT_NAMES that are no defaults or differ from the
    file. The process that creates a store or opens it for writing calls this before the
    first segment is created. The text of the user is not changed: missing lines are inserted before it.
    A crash leaves the old file or the new one, never a part.
    """
    path = config_path(root)
    if not any(_unrecorded(path, config)):
        return False
    from pyengine.storage.durable_file import exclusive
    from pyengine.storage.durable_writes import write_config

    with exclusive(path):
        missing, kept = _unrecorded(path, config)
        text = read_small_text(path) if path.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if _name_of_line(line) not in kept]
        heading = "# Sizes of this store's files, fixed when it was made.\n" if missing else ""
        kept_heading = "# What its queues contain and where its log is, kept from the last start.\n" if kept else ""
        _make_log_folders(root, read_file(path), kept)
        fresh = heading + write_toml(missing) + kept_heading + write_toml(kept)
        write_config(path, (fresh + ("\n" if lines else "") + "".join(lines)).encode())
    return True


def named_log_folders(root: str | os.PathLike[str], values: Mapping[str, Value]) -> LogFolders:
    """Return the log folders that these settings name."""
    return folders_of(root, *(str(values.get(name, "")) for name in LOG_PATHS))


def _refuse_lost_segments(root: str | os.PathLike[str], known: LogFolders, wanted: LogFolders) -> None:
    """Refuse to change the folders of a log if a segment is in none of the new ones. A folder that is not there is given up.

    A folder that is not in the store, in a copy, is the original's.
    """
    from pyengine.storage.engine_id import read_engine_id

    def segments(folders: Iterable[Path]) -> dict[str, Path]:
        found = dict[str, Path]()
        for folder in folders:
            with contextlib.suppress(OSError):
                found |= {name: folder for name in os.listdir(folder) if parse_segment_name(name) is not None}
        return found

    identity = read_engine_id(root)
    if identity is None or {*known.all} <= {*wanted.all}:  # RocketMQ's store, whose folders are not known; nothing is left out
        return
    own = (folder for folder in known.all if not identity.is_copy or folder.resolve().is_relative_to(Path(root).resolve()))
    there, new = segments(own), segments(wanted.all)
    if left := there.keys() - new:
        name, folder = min(left), there[min(left)]
        raise ConfigError(f"{folder} has segments of this log ({name}) that are in no folder of store_path_commit_log = "
                          f"{PATH_SEPARATOR.join(map(str, wanted.writable))}: append the new folder to the old ones, or "
                          f"give {folder} to read_only_commit_log_store_paths")


def _make_log_folders(root: str | os.PathLike[str], present: Mapping[str, Value], values: Mapping[str, Value]) -> None:
    """Make folders that `values` add to a log: once engine.toml names one, it is lost if it does not exist."""
    from pyengine.storage.durable_writes import make_log_folder

    known, wanted = named_log_folders(root, present), named_log_folders(root, {**present, **values})
    if any(folder.is_dir() for folder in known.all):
        for folder in wanted.writable:
            if folder not in known.all:
                make_log_folder(root, folder)


def _unrecorded(path: Path, config: EngineConfig) -> tuple[dict[str, Value], dict[str, Value]]:
    """Return the sizes that an engine.toml lacks, and the settings of KEPT_NAMES that differ from it."""
    present = read_file(path)
    return ({name: getattr(config, name) for name in FIXED_NAMES if name not in present},
            {name: getattr(config, name) for name in KEPT_NAMES if present.get(name, SETTINGS[name].default) != getattr(config, name)})


def set_in_file(path: Path, values: Mapping[str, Value], without: tuple[str, ...] = ()) -> None:
    """Set `values` in an engine.toml and remove the settings in `without`; the rest of the user's text is not changed.

    One process at a time does so; a crash leaves the old file or the new one. ConfigError, with no change, if the file cannot be
    changed line by line.
    """
    from pyengine.storage.durable_file import exclusive

    with exclusive(path):
        _change_lines(path, values, without)


def _change_lines(path: Path, values: Mapping[str, Value], without: tuple[str, ...]) -> None:
    from pyengine.storage.durable_writes import write_config

    present = read_file(path)
    gone = values.keys() | set(without)
    text = read_small_text(path) if path.exists() else ""
    lines = [line for line in text.splitlines(keepends=True) if _name_of_line(line) not in gone]
    if lines and not lines[-1].endswith("\n"):
        lines.append("\n")
    changed = "".join(lines) + write_toml(values)
    wanted = {name: value for name, value in present.items() if name not in gone} | dict(values)
    try:
        same = read_text(changed, path) == wanted
    except ConfigError:
        same = False
    if not same:
        raise ConfigError(f"{path} is written in a way that this command does not change: let it say "
                          + ", ".join(f"{name} = {value}" for name, value in values.items())
                          + "".join(f", leave {name} out" for name in without))
    write_config(path, changed.encode())


def settings_to_set(pairs: Sequence[str], where: str = "config set") -> dict[str, Value]:
    """Return the typed `key=value` arguments of `pyengine config set` (or `where`); ConfigError if one cannot change or has no effect."""
    values: dict[str, Value] = {}
    for key, text in parse_set(list(pairs), where).items():
        name = setting_name(key, where)
        row = SETTINGS[name]
        values[name] = row.read(text, where)
        if row.fixed:
            raise ConfigError(f"{name} is fixed at creation: the store's files have that size. Make a new store")
    return values


def set_durably(root: str | os.PathLike[str], values: Mapping[str, Value]) -> None:
    """Set `values` in the store's engine.toml as set_in_file() does, if the store can be started with them."""
    from pyengine.storage.durable_file import exclusive
    from pyengine.storage.later_format import require_known_format

    require_known_format(root)
    path = config_path(root)
    with exclusive(path):
        present = read_file(path)
        load_config(root, present | dict(values), environ={})
        _make_log_folders(root, present, values)
        _change_lines(path, values, ())


@contextlib.contextmanager
def changing_engine(root: str | os.PathLike[str]) -> Iterator[None]:
    """Wrap the call that gives the settings of set_durably() to a running engine: its EngineError then says that the file has them."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"{config_path(root)} gives it now, but the engine could not be told: {error}. It takes it when its "
                          "supervisor gets SIGHUP, or at its next start") from None


def _name_of_line(line: str) -> str | None:
    """Return the setting that a line of engine.toml sets, None if it sets none."""
    key, equals, _ = line.partition("=")
    return _NAMES.get(fold(key.strip().strip("'\""))) if equals and not key.lstrip().startswith("#") else None


def write_toml(values: Mapping[str, Value]) -> str:
    """Return flat TOML lines that `read_file` reads back to the same values."""
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in values.items())


def _toml_value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    escaped = "".join(
        {"\\": "\\\\", '"': '\\"'}.get(mark) or (mark if mark.isprintable() else f"\\U{ord(mark):08x}") for mark in value)
    return f'"{escaped}"'


def from_environment(environ: Mapping[str, str]) -> dict[str, Value]:
    """Return the PYENGINE_* settings; an empty value counts as unset.

    A name that is not a setting is an error if it looks like a misspelt one; otherwise it is ignored. So is what Kubernetes
    sets for a service whose name begins with `pyengine`.
    """
    values: dict[str, Value] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or not text or _is_service_link(variable, text):
            continue
        folded = fold(variable.removeprefix(ENV_PREFIX))
        name = _NAMES.get(folded)
        if name is not None:
            values[name] = SETTINGS[name].read(text, variable)
        elif not is_inert(folded) and (near := nearest_name(folded, cutoff=0.85)):
            raise ConfigError(f"unknown setting in the environment, {variable}: did you mean {ENV_PREFIX}{near.upper()}?")
    return values


def _is_service_link(variable: str, text: str) -> bool:
    """Whether Kubernetes has set the variable for a service: PYENGINE_PORT=tcp://10.0.0.1:9876, PYENGINE_SERVICE_HOST and so on."""
    return _LINK_VALUE.match(text) is not None or _LINK_NAME.search(variable) is not None


def _sizes_from_files(
    root: str | os.PathLike[str], from_file: Mapping[str, Value], asked: Mapping[str, tuple[Value, str]]
) -> dict[str, tuple[Value, str]]:
    """Derive the file sizes of an existing store that its engine.toml does not have from its files.

    Sizes that the files do not tell are left out: they come from --set or the default.
    """
    if all(name in from_file for name in FIXED_NAMES) or not Path(root).is_dir():
        return {}
    known: dict[str, int] = {name: int(from_file[name]) for name in FIXED_NAMES if name in from_file}
    hints = known | {name: int(value) for name, (value, _) in asked.items() if name in FIXED_NAMES and name not in known}
    from pyengine.storage.message_store import discover  # imported here: it loads the C module, which settings do not need

    found = discover(root, hints)
    return {
        name: (getattr(found, name), FILES)
        for name in FIXED_NAMES
        if name not in known and getattr(found, name) != hints.get(name, SETTINGS[name].default)
    }
