"""A running engine: bring-up, supervisor, the common part of its workers, and Engine, which holds them all."""
