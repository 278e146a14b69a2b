"""One thin module per C header: checks arguments, calls, raises."""
