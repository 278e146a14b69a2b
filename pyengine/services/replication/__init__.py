"""HAService: the log goes to slaves, or comes from the master (docs/replication.md)."""
