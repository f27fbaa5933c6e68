"""Operations of events: outbox and numbering, destinations, deliveries, conditions."""
