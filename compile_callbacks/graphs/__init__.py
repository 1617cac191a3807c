"""Captured graphs: the backend of ``torch.compile``, the comparison with eager, and failures."""
