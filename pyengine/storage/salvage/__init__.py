"""Copy the valid records of a damaged store to a new one."""
