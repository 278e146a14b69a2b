"""What the crash scripts are made of; run as `python -m crash.rounds` with scripts/ on the path.

    acked_producer.py   one producer process: puts for ever, writes down what was acknowledged
    audit.py            what must hold afterwards: nothing acknowledged lost, nothing torn, doubled or out of order
    watch.py            the engine from outside: pids, positions, whether a worker is in the middle of something
    rounds.py           kill at random moments, again and again, then audit
"""
