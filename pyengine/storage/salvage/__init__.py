"""Carve what is valid out of a damaged store into a new one."""
