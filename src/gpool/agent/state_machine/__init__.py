"""The agent's state machine: events in, instructions out. Pure: no clock, no sockets, no processes."""
