"""Private network of a gang, encrypted between members."""
