"""Server side of GPU verification: batches, time limits, checks of answers."""
