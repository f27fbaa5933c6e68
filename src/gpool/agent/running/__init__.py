"""Executors of the state machine's instructions: commands, runners, checkpoints, artifacts, warm sandboxes."""
