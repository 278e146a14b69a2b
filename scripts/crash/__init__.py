"""What the crash scripts are made of; run as `python -m crash.rounds` with scripts/ on the path.

    acked_producer.py    one producer process: puts for ever, writes down what was acknowledged
    acked_consumer.py    one consumer process: reads in two groups for ever, writes down what was committed
    audit.py             what must hold afterwards: nothing acknowledged lost, nothing torn, doubled or out of order
    watch.py             the engine from outside: pids, positions, whether a worker is in the middle of something
    rounds.py            kill at random moments, again and again, then audit; the others build on it:
    restart_loop.py      stop and start in every way
    recovery_rounds.py   kill recoveries, three deep
    hang_rounds.py       stop processes, put under them, let them go on or kill them
    disk_full_rounds.py  a disk that is full, again and again
    failpoint_rounds.py  kill or stop a process at each named step
    report.py, peer.py   what all of them do around it: options, the last line, the real RocketMQ as judge
"""
