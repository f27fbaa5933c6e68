"""Networks for sandboxes: a lane each, that reaches the public internet or a given list, and nothing else."""
