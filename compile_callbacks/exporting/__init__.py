"""Export of a module to a ``.pt2`` package, and loading of packages."""
