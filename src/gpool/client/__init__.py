"""The SDK: Client, @task, runs. It talks to a server through one door and knows nothing of servers or agents."""
