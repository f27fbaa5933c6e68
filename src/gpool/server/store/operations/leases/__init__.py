"""Operations on leases: grants, heartbeats, reports, ends and preemption."""
