"""What is behind an error of the Hub, and whether it passes by itself."""

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError


# Status codes after which the same request may succeed: time-outs, too many requests, trouble of the server.
PASSING = (408, 429, 500, 502, 503, 504)


def cause_of(error: BaseException) -> BaseException:
    """Find what went wrong with a file, which the Hub's client wraps in an error of its own.

    Args:
        error (`BaseException`): What a call raised.

    Returns:
        `BaseException`: the cause, or the error itself.
    """
    is_wrapper = type(error) in (RuntimeError, LocalEntryNotFoundError)
    return error.__cause__ if is_wrapper and error.__cause__ is not None else error


def status_of(error: BaseException) -> int | None:
    """Return the status code of the Hub's answer.

    Args:
        error (`BaseException`): What a call raised.

    Returns:
        `int` or `None`: the code, or none if no answer came.
    """
    return getattr(getattr(error, "response", None), "status_code", None)


def is_passing(error: BaseException) -> bool:
    """Tell whether the same request may succeed later: trouble of the server, or no answer at all.

    Args:
        error (`BaseException`): What a call raised.

    Returns:
        `bool`: `False` for a refusal, where the network is switched off, and for the errors of xet, whose client has
            tried again itself, for minutes.
    """
    if isinstance(error, HfHubHTTPError):
        return status_of(error) in PASSING
    return isinstance(error, TimeoutError | HTTPError)  # that of xet is a ConnectionError


def add_advice(error: BaseException) -> None:
    """Note what to do about an error that was given up on.

    Args:
        error (`BaseException`): What a call raised; the note follows its message.
    """
    status = status_of(error)
    if status == 401:
        error.add_note(
            "The Hub does not know the token, if any was given. Log in with `hf auth login`, or set HF_TOKEN."
        )
    elif status == 403:
        error.add_note("The token has no right to write there: give it that right, or check the namespace.")
    elif status is None and is_passing(error):
        error.add_note(f"No answer from {constants.ENDPOINT}. Try again later: what has arrived is not sent again.")
