"""Machine monitors: the programs that run guests, behind one protocol."""
