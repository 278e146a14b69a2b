"""Bring a stopped store to order: recovery, rebuild, the cut of a log (docs/recovery.md)."""
