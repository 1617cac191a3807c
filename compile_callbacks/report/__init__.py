"""The report of a run as data, table, text, plot, file and logger entries."""
