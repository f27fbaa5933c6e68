"""The private network of a gang: a relay a lane carries IP packets, enciphered, between the members and to nobody else."""
