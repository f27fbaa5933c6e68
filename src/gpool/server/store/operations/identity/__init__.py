"""Operations on users, teams, sessions, sealed fields and the audit log."""
