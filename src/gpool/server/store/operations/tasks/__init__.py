"""Operations on tasks: submissions, reading and cancelling, artifacts, checkpoints, logs, storage, idempotency keys."""
