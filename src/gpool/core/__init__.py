"""The mind: values, the lifecycle, scheduling. Pure: no clock, no dice, no I/O."""
