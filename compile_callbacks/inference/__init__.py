"""`InductorBackend`: a module compiled for inference without a Trainer."""
