"""Actions on money: balances, grants, refunds, budgets, verification of the ledger."""
