"""Money in integer micro-credits: prices, charges, the ledger. Pure."""
