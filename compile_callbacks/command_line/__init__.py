"""The command ``compile-callbacks``."""
