"""Machine monitors: programs that run guests."""
