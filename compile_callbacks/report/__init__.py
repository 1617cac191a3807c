"""The report, and each form in which it is shown."""
