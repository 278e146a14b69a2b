"""Objects that processes share: shared memory, latches, locks, sessions."""
