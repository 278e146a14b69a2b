"""The whole-store check: what is damaged, how bad it is, what to do."""
