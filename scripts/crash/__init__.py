"""What the crash scripts are made of; run as `python -m crash.kills` with scripts/ on the path.

    acked_producer.py    one producer process: puts for ever, writes down what was acknowledged
    acked_consumer.py    one consumer process: reads in two groups for ever, writes down what was committed
    audit.py             what must hold afterwards: nothing acknowledged lost, nothing torn, doubled or out of order
    rounds.py, replicas.py   kill at random moments, again and again, then audit: one engine, or a master and its slave
    kills.py             ... one kind of process; the other scripts build on the same rounds:
    restart_loop.py      stop and start in every way
    recovery_rounds.py   kill recoveries, three deep
    hang_rounds.py       stop processes, put meanwhile, resume or kill them
    disk_full_rounds.py  a disk that is full, again and again
    failpoints.py        kill or stop a process at each named step (failpoint_rounds.py, failpoint_replicas.py)
    report.py, peer.py   what all of them do around it: options, the last line, the real RocketMQ as judge

The rounds themselves, the watch on an engine from outside and the check of what was acknowledged are
pyengine/cli/torture.py, which `pyengine prove` uses too.
"""
