"""What stands between processes: shared memory, latches, locks, sessions."""
