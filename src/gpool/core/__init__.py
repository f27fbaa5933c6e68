"""Values, lifecycle tables and scheduling. Pure: no clock, no randomness, no I/O."""
