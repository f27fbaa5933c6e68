"""Private network of a gang: a relay per member carries IP packets, encrypted, between the members only."""
