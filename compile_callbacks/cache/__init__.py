"""The folder for compiled code, and a small file for each model."""
