"""The machine: hardware detection, GPU monitoring and the owner's policy."""
