"""What processes share: shared memory, latches, locks, sessions."""
