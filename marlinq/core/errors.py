"""The errors a user can cause, each with its own exit code.

The hierarchy is closed: code raises one of these for anything a user, a file or the environment can
bring about, and lets everything else propagate as a bug. A message is one line that names the file,
tensor or option, says what was expected and what was found, and ends with what to do.
"""

from __future__ import annotations

from marlinq.core.safe_text import one_line


class MarlinqError(Exception):
    """Base of every error that the command line reports without a traceback."""

    exit_code = 1

    def __str__(self) -> str:
        # Messages quote paths and names that others chose: in a traceback too they are one printable line.
        return one_line(super().__str__())


class UsageError(MarlinqError):
    """An option or argument is wrong or contradicts another."""

    exit_code = 2


class CheckpointError(MarlinqError):
    """A checkpoint folder is missing, incomplete, inconsistent or hostile."""

    exit_code = 3


class UnsupportedError(MarlinqError):
    """The input is well-formed but asks for something marlinq does not handle."""

    exit_code = 4


class ConversionRefused(MarlinqError):
    """A conversion would lose information, so it was not made."""

    exit_code = 5


class NumericsError(MarlinqError):
    """Weights, activations or statistics hold NaN or infinity, or can't be factorised."""

    exit_code = 6


class VerificationFailed(MarlinqError):
    """At least one check of `marlinq verify` did not hold."""

    exit_code = 7


class EnvironmentProblem(MarlinqError):
    """A package, driver or device that the command needs is absent or unusable."""

    exit_code = 8


class OutputError(MarlinqError):
    """The output folder exists, can't be written, or belongs to a different unfinished run."""

    exit_code = 9
