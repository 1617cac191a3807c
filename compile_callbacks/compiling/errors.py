"""What a user sees where something was not compiled as asked."""


class CompileError(RuntimeError):
    """A target cannot do what was asked for.

    The compiler failed on it, or it differs from eager or has a new shape, where ``"raise"`` was asked for; or
    gradients were to be differentiated, and cannot be.
    """


class CompileWarning(UserWarning):
    """Something was not compiled as asked."""
