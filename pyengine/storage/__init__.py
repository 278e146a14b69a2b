"""Files on disk. Knows nothing of other processes."""
