"""Verbs of the market: offers, quotes, balances, budgets, receipts and payouts."""
