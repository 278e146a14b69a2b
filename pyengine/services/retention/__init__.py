"""The deletion of old files: CleanCommitLogService, CleanConsumeQueueService, and the cleaner that runs them."""
