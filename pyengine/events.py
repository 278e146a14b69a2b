"""What processes of an engine say in the log: each line is one of these events, with its level, its meaning and what to do.

docs/events.md is made from this table. A name is a promise to those who filter by it: it stays, or CHANGELOG.md says that it
went. Nothing of the engine reads events.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

# Levels, as syslog and the journal number them.
ERROR, WARNING, INFO = 3, 4, 6

NOTHING = "Nothing."


class Event(Enum):
    """(level, what happened, what to do): of each kind of line."""

    # ---- the engine ----
    ENGINE_RECOVERED = (INFO, "The engine comes up; the line says what recovery found and how long it took.",
                        "Nothing after `the normal path`. After `the abnormal path`: read what was cut, if anything was.")
    RECOVERY_NOTE = (INFO, "Something that recovery did or left, and that the engine goes on with.",
                     "Read it. What was put aside is under `STORE/quarantine`: `pyengine quarantine list STORE`.")
    ENGINE_ADOPTED = (INFO, "A new supervisor took over workers that outlived the one before.",
                      "Find out what ended that one: `dmesg`, `journalctl -k`.")
    ENGINE_STOPPED = (INFO, "The engine has stopped in order: all is durable and dispatched, and the next start is a clean one.",
                      NOTHING)
    ENGINE_WAITS = (WARNING, "Workers of an earlier start live, and cannot be taken over: the start waits for them to end.",
                    "Nothing for a minute; then it says which processes to end.")
    STORE_READ_ONLY = (ERROR, "Something of the log did not become durable: the store takes no puts from now on, and can be read.",
                       "Look at the disk (`dmesg`), then stop and start: recovery finds out what is whole ([faults.md](faults.md)).")
    STOP_UNCLEAN = (WARNING, "The engine has ended, but not in order; the line says what was left.",
                    "Start it: recovery brings the store in order. If the same line comes again, look at the disk.")
    ENGINE_RESTARTS = (WARNING, "The engine cannot go on as it is, so it stops in order and starts again by itself.",
                       "Changed settings: nothing. Removed files: find out what removes them (RemoveIPC of logind, a cleaner of /dev/shm).")
    MEMORY_OVERWRITTEN = (ERROR, "Something has written over the engine's shared memory: the workers are killed.",
                          "Start it again. Look for another program that writes to files of /dev/shm.")
    START_FAILED = (ERROR, "The engine, or one worker, could not come up.",
                    "Do what the line says: a setting, a right, room on the disk, a store that is in use.")
    SETTINGS_READ = (INFO, "The settings were read again: the line says what changed, and what waits for a restart.", NOTHING)
    SETTINGS_REFUSED = (WARNING, "The settings could not be read again: all stay as they are.",
                        "Mend engine.toml, then send SIGHUP again: `pyengine config explain STORE`.")
    # ---- its workers ----
    WORKER_ENDED = (WARNING, "A worker has ended by itself or was killed; it is started again, unless the engine stops.",
                    "`SIGKILL`: the OOM killer (`dmesg`) or an operator. `exit 1`: its trace is just above; report it.")
    WORKER_FAILED = (ERROR, "What a worker died of, in its own words.",
                     "Out of room, descriptors or memory: give it more. It is started again.")
    WORKER_STUCK = (WARNING, "A worker has made no progress for long: it is aborted and started again.",
                    "`pyengine why STORE`; a disk that does not answer is the usual cause (`dmesg`, `iostat -x`).")
    WORKER_STOPPED = (WARNING, "A worker was stopped by a signal (SIGSTOP, a debugger); it is resumed.",
                      "Find out who stops it: puts wait meanwhile.")
    WORKER_NOT_STARTED = (WARNING, "The system gave no process for a worker; it is tried again.",
                          "Look at the memory, and at the limit of processes (`TasksMax=`, `ulimit -u`).")
    WORKER_RENEWED = (INFO, "A worker of another build is restarted, as part of an upgrade.", NOTHING)
    NAMES_REMOVED = (WARNING, "The engine's files in shared memory are gone, and no supervisor runs: the workers finish and end.",
                     "Start the engine. Find out what removes them (RemoveIPC of logind, a cleaner of /dev/shm).")
    MEMORY_NOT_LOCKED = (WARNING, "Memory could not be locked: a put may wait for a page.",
                         "Raise the memlock limit to what the line says (`LimitMEMLOCK=`, `ulimit -l`).")
    POOL_SMALLER = (WARNING, "The pool has fewer buffers than asked for.",
                    "Make room in shared memory, or lower `transient_store_pool_size`.")
    # ---- their work ----
    WORK_BLOCKED = (WARNING, "A worker cannot do its work, says why, and tries again by itself.",
                    "Remove the cause: room, rights, a port. `pyengine status STORE` shows it for as long as it lasts.")
    WORK_RESUMED = (INFO, "What blocked a worker is over.", NOTHING)
    PUTS_REFUSED = (WARNING, "The disk is too full: puts are refused until there is room.",
                    "Make room, or shorten `file_reserved_time_hours` ([cleaning.md](cleaning.md)).")
    PUTS_TAKEN = (INFO, "There is room again: puts are taken.", NOTHING)
    SEGMENT_HELD = (INFO, "A segment is due to be deleted, but a reader or a log hold keeps it.",
                    "Nothing, unless it comes for hours: then end the holder that it names, or let it catch up.")
    SEGMENT_FORCED = (WARNING, "A segment was deleted although a reader held it for too long.",
                      "The reader it names has lost its place: let it begin at the log's new start.")
    OLD_LOG_READ = (INFO, "The log from before this engine is read and whole: it counts as durable from here on.", NOTHING)
    LOG_DAMAGED = (ERROR, "Recovery, or the reading of the log from before this engine, has found damage below what was durable.",
                   "Restore that segment from a backup or a replica, or `pyengine salvage STORE DEST` ([recovery.md](recovery.md)).")
    TABLE_UNUSABLE = (WARNING, "A table in `STORE/config` cannot be read as it is; the line says what is done without it.",
                      "Mend or restore the file; the last good one is beside it, with `.bak`.")
    DELAY_OFFSET_MOVED = (WARNING, "A delay level's noted offset lies outside its queue; delivery goes on at the nearest.",
                          "Messages between the two may come twice or not at all: ask who changed delayOffset.json.")
    DELAYED_NOT_DELIVERED = (WARNING, "One delayed message cannot be delivered, now or later; those after it are.",
                             "The line says why and where it is; `pyengine get` reads it.")
    # ---- replication ----
    SLAVE_FOLLOWS = (INFO, "A slave is connected and follows.", NOTHING)
    SLAVE_GONE = (WARNING, "A slave's connection has ended.",
                  "If it does not come back: look at that host, and at the network in between.")
    SLAVE_REFUSED = (WARNING, "A peer was refused as a slave, or none can be taken as things are set.",
                     "One of yours: give both the same `ha_secret_file` ([replication.md](replication.md)). Else: close the port to it.")
    MASTER_FOLLOWED = (INFO, "This slave is connected to its master and follows.", NOTHING)
    MASTER_LOST = (WARNING, "This slave cannot follow its master now; the line says why, and it tries again.",
                   "Look at that host and the network; `pyengine status STORE` tells how far behind it is.")
    FENCED = (ERROR, "A master of a higher term has taken this one's place: puts are refused from now on.",
              "Start this store as that one's slave ([replication.md](replication.md)).")
    SECOND_MASTER = (ERROR, "Two masters of the same term know of each other: their logs part.",
                     "Stop one of the two at once, and start it as the other's slave.")
    # ---- the gateway ----
    GATEWAY_LISTENS = (INFO, "The gateway takes clients at these addresses.", NOTHING)
    GATEWAY_ACCESS = (INFO, "The gateway has read its access list or its certificate; it counts from now on.", NOTHING)
    CLIENT_FAILED = (INFO, "A request or a connection of one client failed; others go on.",
                     "The client's own log says what it made of it.")

    def __init__(self, level: int, meaning: str, action: str) -> None:
        self.level = level
        self.meaning = meaning
        self.action = action


Report = Callable[[Event, str], None]  # takes an event and its sentence for the log
