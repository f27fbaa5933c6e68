"""GPU measurement and verification on the agent."""
