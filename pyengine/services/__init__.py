"""RocketMQ's ServiceThreads by name, one module each; service.py has what they share and how a worker drives them."""
