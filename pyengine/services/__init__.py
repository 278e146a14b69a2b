"""What RocketMQ calls ServiceThreads: decide and act; no process handling."""
