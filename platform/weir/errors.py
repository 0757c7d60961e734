"""Errors of the platform's own commands, for the person at the terminal."""


class StartError(Exception):
    """Weir can't start.

    The message says why and what to do; it is printed without a traceback and ends the process with 1.
    """
