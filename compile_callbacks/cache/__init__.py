"""The folder for compiled code, and what it stores about a model."""
