"""Documents that cross the network: `frames` of the agent's channel, `documents` of REST."""
