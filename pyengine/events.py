"""What an engine's processes write to the log: each line is one of these events, with its level, meaning and what to do.

docs/events.md is made from this table. Users filter by the names: a name stays, or CHANGELOG.md says that it is removed. The
engine itself does not read events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

# Levels, as syslog and the journal number them.
ERROR, WARNING, INFO = 3, 4, 6

NOTHING = "Nothing."


class Event(Enum):
    """Each kind of line: (level, what happened, what to do)."""

    # ---- the engine ----
    ENGINE_RECOVERED = (INFO, "The engine starts; the line says what recovery found.",
                        "After `the abnormal path`: read what was cut.")
    RECOVERY_NOTE = (INFO, "Recovery did or left something.",
                     "Removed bytes: `pyengine quarantine STORE`.")
    ENGINE_ADOPTED = (INFO, "A new supervisor has adopted living workers.",
                      "Find out what ended the last one: `dmesg`.")
    ENGINE_STOPPED = (INFO, "The engine has stopped in order: all is durable and dispatched.",
                      NOTHING)
    ENGINE_UNUSED = (INFO, "The last process that shared the engine has left it: it stops in order.", NOTHING)
    ENGINE_WAITS = (WARNING, "The start waits for workers of an earlier one that cannot be adopted, or a new slave for its master.",
                    "Wait a minute; then it fails, and says what to end or to start.")
    STORE_READ_ONLY = (ERROR, "A sync or a write of the log failed: the store refuses puts, and can be read.",
                       "Look at the disk (`dmesg`), then stop and start: recovery mends what it can ([recovery.md](recovery.md)).")
    STOP_UNCLEAN = (WARNING, "The engine has not ended in order; the line says what was left.",
                    "Start it: recovery repairs the store.")
    ENGINE_RESTARTS = (WARNING, "The engine stops in order and starts again by itself.",
                       "If files were removed, find what removes them (RemoveIPC of logind, a cleaner of /dev/shm).")
    STORE_LOST = (ERROR, "The store's folder was moved, removed or replaced: puts are refused, and the engine ends.",
                  "Start the engine where the store is now.")
    MEMORY_OVERWRITTEN = (ERROR, "Another program has overwritten shared memory: the workers are killed.",
                          "Start the engine. Find what writes to files of /dev/shm.")
    START_FAILED = (ERROR, "The engine or one worker could not start.",
                    "Do what the line says.")
    SETTINGS_READ = (INFO, "The settings were read again; some may need a restart.", NOTHING)
    SETTINGS_REFUSED = (WARNING, "The settings could not be read again, and stay.",
                        "Correct engine.toml, then send SIGHUP again: `pyengine config explain STORE`.")
    # ---- its workers ----
    WORKER_ENDED = (WARNING, "A worker has ended; it is started again.",
                    "`SIGKILL`: the OOM killer (`dmesg`) or an operator. `exit 1`: its trace is above this line; report it.")
    WORKER_FAILED = (ERROR, "A worker ends with an error, and is started again.",
                     "Free disk space, descriptors or memory if it lacks them.")
    WORKER_STUCK = (WARNING, "A worker makes no progress: it is aborted and started again.",
                    "`pyengine why STORE`; usually a disk that does not answer (`dmesg`, `iostat -x`).")
    WORKER_STOPPED = (WARNING, "A worker was stopped by a signal (SIGSTOP, a debugger); it is resumed.",
                      "Find out which program stops it.")
    WORKER_NOT_STARTED = (WARNING, "A worker's process could not be created.",
                          "Raise the limit of processes (`TasksMax=`, `ulimit -u`), or free memory.")
    WORKER_RENEWED = (INFO, "A worker of another build is restarted.", NOTHING)
    NAMES_REMOVED = (WARNING, "The files in shared memory are gone, and no supervisor runs: the workers end.",
                     "Start the engine; see ENGINE_RESTARTS.")
    MEMORY_NOT_LOCKED = (WARNING, "Memory could not be locked: puts may wait for pages.",
                         "Raise the memlock limit to what the line says (`LimitMEMLOCK=`, `ulimit -l`).")
    POOL_SMALLER = (WARNING, "The pool has fewer buffers than the setting asks for.",
                    "Make room in shared memory, or lower `transient_store_pool_size`.")
    # ---- their work ----
    WORK_BLOCKED = (WARNING, "A worker cannot do its work, and tries again.",
                    "Remove the cause that the line names.")
    WORK_RESUMED = (INFO, "A worker that was blocked works again.", NOTHING)
    PUTS_REFUSED = (WARNING, "The disk is too full for puts.",
                    "Make room, or shorten `file_reserved_time_hours` ([cleaning.md](cleaning.md)).")
    PUTS_TAKEN = (INFO, "There is room again.", NOTHING)
    SEGMENT_HELD = (INFO, "A segment is due to be deleted, but a reader or log hold keeps it.",
                    "If the line repeats for hours, end the holder that it names.")
    SEGMENT_FORCED = (WARNING, "A segment was deleted although a reader held it.",
                      "Restart the reader that the line names.")
    OLD_LOG_READ = (INFO, "The log from before this engine is whole: it counts as durable.", NOTHING)
    LOG_DAMAGED = (ERROR, "There is damage below the durable end.",
                   "Restore that segment from a backup or a replica, or `pyengine salvage STORE DEST` ([recovery.md](recovery.md)).")
    TABLE_UNUSABLE = (WARNING, "A table in `STORE/config` cannot be read.",
                      "Repair or restore the file, from its `.bak`.")
    QUEUE_OUT_OF_ORDER = (WARNING, "A message is not the next of its queue; a lower one is left out.",
                          "`pyengine check STORE`.")
    DELAY_OFFSET_MOVED = (WARNING, "A delay level's noted offset is outside its queue; delivery continues at the nearest one.",
                          "Messages between may come twice or never.")
    DELAYED_NOT_DELIVERED = (WARNING, "A delayed message can never be delivered.",
                             "The line says why.")
    # ---- replication ----
    SLAVE_FOLLOWS = (INFO, "A slave follows.", NOTHING)
    SLAVE_GONE = (WARNING, "A slave's connection has ended.",
                  "Look at that host and the network.")
    SLAVE_REFUSED = (WARNING, "A peer was refused as a slave, or the settings allow no slave.",
                     "Give both the same `ha_secret_file` ([replication.md](replication.md)), or close the port.")
    MASTER_FOLLOWED = (INFO, "This slave follows its master.", NOTHING)
    MASTER_LOST = (WARNING, "This slave cannot follow its master, and tries again.",
                   "Look at that host and the network.")
    FENCED = (ERROR, "There is a master of a higher term: this one refuses puts from now on.",
              "Start this store as a slave of that master ([replication.md](replication.md)).")
    SECOND_MASTER = (ERROR, "Another master has the same term: their logs diverge.",
                     "Start one as the other's slave, or `promote --force` the fenced one.")
    # ---- the gateway ----
    GATEWAY_LISTENS = (INFO, "The gateway takes clients at these addresses.", NOTHING)
    GRPC_LISTENS = (INFO, "Clients of RocketMQ 5 are taken at this address.", NOTHING)
    CONNECTIONS_FEWER = (WARNING, "The gateway takes fewer connections than `gateway_connections_max`.",
                         "Raise `LimitNOFILE=` (`ulimit -n`).")
    GATEWAY_ACCESS = (INFO, "The gateway has read its access list or its certificate.", NOTHING)
    NAME_SERVER_JOINED = (INFO, "The gateway is registered with a name server.", NOTHING)
    NAME_SERVER_LOST = (WARNING, "The gateway is not registered with a name server; it tries again.", "Look at that host and the network.")
    CLIENT_FAILED = (INFO, "A request or a connection of one client failed.",
                     "See the client's own log.")

    CLIENT_REFUSED = (INFO, "The access list of the gateway refuses a client's request.",
                      "Mend the client's key or rights ([gateway.md](gateway.md)).")

    def __init__(self, level: int, meaning: str, action: str) -> None:
        self.level = level
        self.meaning = meaning
        self.action = action


Report = Callable[[Event, str], None]  # takes an event and its sentence for the log

WINDOW_NS = 60_000_000_000
LINES_MAX = 6       # of one kind and one host in a window; further ones are counted, and the count is a line
HOSTS_MAX = 64      # with a limit of their own; all others share one
OTHER_HOSTS = "other hosts"


@dataclass(slots=True)
class _Count:
    until_ns: int
    lines: int = 0
    left_out: int = 0


class HostLines:
    """Reports lines that peers of the network cause, a few a minute of each kind, so that none of them can fill the disk with the log.

    Used by one thread."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._counts: dict[tuple[Event, str], _Count] = {}

    def report(self, host: str, event: Event, text: str, now_ns: int) -> None:
        """Report an event with a sentence about a host."""
        if (event, host) not in self._counts and len(self._counts) >= HOSTS_MAX:
            host = OTHER_HOSTS
        count = self._counts.setdefault((event, host), _Count(now_ns + WINDOW_NS))
        if count.lines < LINES_MAX:
            count.lines += 1
            self._report(event, text)
        else:
            count.left_out += 1

    def tick(self, now_ns: int) -> None:
        """Report the counts of past minutes; called from time to time."""
        for (event, host), count in [(key, count) for key, count in self._counts.items() if now_ns >= count.until_ns]:
            del self._counts[event, host]
            if count.left_out:
                self._report(event, f"{host}: {count.left_out:,} more lines like those above within a minute")
