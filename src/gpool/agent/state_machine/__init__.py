"""The agent's state machine. Pure: no clock, no sockets, no processes."""
