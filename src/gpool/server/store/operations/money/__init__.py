"""Operations of the ledger: accounts, transfers, sealed blocks."""
