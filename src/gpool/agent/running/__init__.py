"""Executors of the state machine's instructions."""
