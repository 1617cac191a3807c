"""Checks of what torch.compile needs: what the machine has, what will not work, and how to fix it."""
