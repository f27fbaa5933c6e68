"""Server side of GPU verification: batches, time limits and the check of a GPU's answer."""
