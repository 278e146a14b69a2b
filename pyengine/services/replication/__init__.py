"""HAService: send the log to slaves, or receive it from the master (docs/replication.md)."""
