"""Measures steps, compiles and memory, and prints the progress of compiles."""
