"""The SDK: clients, tasks, runs. It imports no server or agent."""
