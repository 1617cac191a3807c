"""`InductorBackend`: compiles a module for inference without a Trainer."""
