"""Helpers that know nothing about compiling; any part of the package may import them."""
