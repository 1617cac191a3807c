"""What a user sees where something was not compiled as asked."""


class CompileError(RuntimeError):
    """The compiler failed on a target, and ``on_error="raise"`` was asked for."""


class CompileWarning(UserWarning):
    """Something was not compiled as asked."""
