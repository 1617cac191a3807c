"""Where a module is, and what its device is called."""
