"""A module as a package to deploy."""
