"""The SDK: clients, tasks, runs. It reaches the server through `connection.transport` and imports no server or agent."""
