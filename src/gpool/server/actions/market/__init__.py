"""Actions of consumers on prices: offers and quotes."""
