"""Operations on nodes and their GPUs."""
