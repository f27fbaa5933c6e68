"""Verified results: draws of nodes, comparison of answers, the loop that decides."""
