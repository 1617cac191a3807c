"""Settings of a phase: modes, templates and Inductor options."""
