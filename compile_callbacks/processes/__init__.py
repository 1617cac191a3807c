"""Several processes of one run: what they agree on, and when they meet."""
