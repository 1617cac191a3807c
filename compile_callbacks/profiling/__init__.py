"""What is measured: steps, compiles, memory, and where a run has got to."""
