"""What a phase is compiled with: modes, options, templates, candidates."""
