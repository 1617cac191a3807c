"""One module, compiled and measured: what the callback's hooks act on. No Lightning in it."""
