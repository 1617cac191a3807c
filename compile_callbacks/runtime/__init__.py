"""What runs while a module is compiled: ranks, and the compile cache."""
