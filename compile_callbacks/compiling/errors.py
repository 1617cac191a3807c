"""What a user sees where something was not compiled as asked."""


class CompileError(RuntimeError):
    """The compiler failed on a target, or it differs from eager or has a new shape, where ``"raise"`` was asked for; or
    gradients that cannot be differentiated were to be.
    """


class CompileWarning(UserWarning):
    """Something was not compiled as asked."""
