"""A module compiled for inference, with a lifecycle and without a Trainer."""
