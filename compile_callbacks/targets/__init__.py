"""The modules and methods that are compiled: their names, and how they are found."""
