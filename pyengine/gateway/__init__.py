"""The gateway: a name server and a broker for unchanged RocketMQ 4.9 clients, in one process, as a client of the engine."""
