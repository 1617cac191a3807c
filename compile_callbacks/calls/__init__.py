"""Calls of targets: the dispatcher in a module, and the compiled target that it calls."""
