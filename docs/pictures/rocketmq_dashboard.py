"""A screenshot of RocketMQ-Dashboard 1.0.0 at the gateway of a store into which a Python program puts.

Made by hand: build the tag rocketmq-dashboard-1.0.0 with Maven, start its jar with --rocketmq.config.namesrvAddr=HOST:9876, and open
/#/cluster in a window of 1480 x 330 pixels.
"""

from __future__ import annotations

ALT = """RocketMQ-Dashboard's page of the cluster: the gateway as broker-a, number 0, a master, version V4_9_8, with the
messages a second that are put and the day's count."""
