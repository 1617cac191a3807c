"""Measures steps, compiles and memory, and prints what compiles."""
