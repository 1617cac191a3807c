"""Measures modes of torch.compile side by side on one module."""
