"""Repair a stopped store: recovery, rebuild, the cut of a log (docs/recovery.md)."""
