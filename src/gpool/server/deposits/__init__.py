"""Deposits by chain transfers: settings, what a node of the chain answers, and the loop that credits them."""
