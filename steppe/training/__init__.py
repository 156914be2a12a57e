"""`steppe train`: configuration, model, data, loop and checkpoints of a real run."""
