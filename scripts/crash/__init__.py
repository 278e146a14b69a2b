"""The crash scripts; run as `python -m crash.kills` with scripts/ on the path.

    acked_producer.py    one producer process: puts until it is ended, and lists what was acknowledged
    acked_consumer.py    one consumer process: reads in two groups until it is ended, and lists what was committed
    audit.py             the judgement: no acknowledged message is lost, none is torn, doubled or out of order
    rounds.py, replicas.py   kill at random moments in many rounds, then audit: one engine, or a master and its slave
    kills.py             kill one kind of process; the other scripts use the same rounds:
    restart_loop.py      stop and start in every way
    recovery_rounds.py   kill recoveries, three deep
    members.py           kill members of groups that acknowledge by message
    hang_rounds.py       stop processes, put meanwhile, resume or kill them
    disk_full_rounds.py  fill the disk
    failpoints.py        kill or stop a process at each step of steps.py, by board.py (failpoint_rounds.py, failpoint_replicas.py)
    systemd_drills.py    do to an engine of units what can happen to it
    served.py            rounds for gateway and gRPC worker, with producers that speak RocketMQ's protocol
    proof.py             docs/proof.md, from the results of these scripts
    report.py, peer.py   shared by all: options, the last line, RocketMQ as judge

pyengine/cli/torture.py has the rounds themselves, the observation of an engine from outside and the check of acknowledged
messages; `pyengine prove` uses it too.
"""
