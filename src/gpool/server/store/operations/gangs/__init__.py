"""Operations on gangs: tasks that several nodes hold at once."""
