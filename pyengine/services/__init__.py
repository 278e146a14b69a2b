"""RocketMQ's ServiceThreads under their names, one module each; service.py has their common base and how a worker drives them."""
