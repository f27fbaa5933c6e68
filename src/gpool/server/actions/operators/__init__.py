"""Operator actions: users, quotas, policy, audit log."""
