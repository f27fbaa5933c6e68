"""Scheduling on the server: the picture of the state, the passes, backoff, forecasts, explanations and the loops."""
