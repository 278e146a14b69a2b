"""The whole-store check: the damage, its grade, and what to do about it."""
