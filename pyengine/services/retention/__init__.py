"""What may be deleted, and when: CleanCommitLogService and its like."""
