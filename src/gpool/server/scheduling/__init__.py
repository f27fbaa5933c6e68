"""Scheduling on the server: state picture, passes, backoff, forecasts, explanations, loops."""
