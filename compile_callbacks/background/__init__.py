"""The helper process that compiles graphs while training continues."""

IS_HELPER = "_COMPILE_CALLBACKS_HELPER"
"""The environment variable that marks a helper process and its children. They get no callback from the environment, and
start no helper process: in a frozen application, ``sys.executable`` may be the application, which would train again."""
