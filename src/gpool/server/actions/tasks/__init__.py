"""Tasks, batches, artifacts, logs."""
