"""Compiles the targets of a module and runs them: `Session` is the entry point."""
