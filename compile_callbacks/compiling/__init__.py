"""What stands in a module's call: targets, the compiled region, the switch, and checks of what it gives."""
