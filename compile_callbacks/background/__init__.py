"""The helper process that compiles graphs while training continues."""
