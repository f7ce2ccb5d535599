"""The error of all packages for what a user got wrong."""


class UserError(ValueError):
    """A mistake of the user: one line that names what is wrong, its value, and what to do.

    Commands print it and exit with status 2; any other error is a bug, which ends with a traceback.
    """
