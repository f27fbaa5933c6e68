"""Replicas: several servers on one PostgreSQL database, one of them the leader. Decision 0031 explains the parts."""
