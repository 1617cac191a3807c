"""Models, data and processes that several tests share."""
