"""The letterbox: every document that crosses the network. `frames` for the agent's channel, `documents` for REST."""
