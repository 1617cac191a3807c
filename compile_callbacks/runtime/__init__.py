"""The compiled targets of a module, and the session that runs them."""
