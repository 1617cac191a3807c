"""Settings of a phase: modes, templates, Inductor options, and the candidates of a `Tune`."""
