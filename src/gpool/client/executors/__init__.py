"""Interfaces of other libraries over the pool: `concurrent.futures` and joblib."""
