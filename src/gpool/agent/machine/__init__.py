"""The machine: detection of hardware, monitoring of GPUs, and the owner's policy on what is lent."""
