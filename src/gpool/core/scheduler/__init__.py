"""Scheduling: events fold into State, `plan(state, now)` reads it and decides. Nothing here writes."""
