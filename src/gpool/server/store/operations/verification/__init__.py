"""Operations of verified results: siblings, verdicts, standing of nodes."""
