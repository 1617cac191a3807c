"""One run: the `Session`, what its steps run, and its arguments and warnings."""
