"""Accounts, sessions, keys, wallets, teams."""
