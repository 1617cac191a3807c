"""Helpers that do not depend on the compiler. Any part of the package may import them."""
