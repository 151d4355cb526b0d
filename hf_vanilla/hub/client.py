"""Talking to the Hub: what its errors mean, and which calls are tried again."""

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import TypeVar

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError
from transformers.utils import logging


logger = logging.get_logger(__name__)

Result = TypeVar("Result")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


ATTEMPTS = 6


LONGEST_WAIT = 300.0  # seconds; the Hub counts requests over five minutes


def retry(call: Callable[[], Result], also: tuple[int, ...] = ()) -> Result:
    """Call the Hub until it answers: again after trouble of the server or the line, but not after a refusal.

    Args:
        call (`Callable[[], Result]`):
            What asks the Hub.
        also (`tuple[int, ...]`):
            The statuses of refusals that pass by themselves for this call.

    Returns:
        `Result`: what the call returns.

    Raises:
        HfHubHTTPError: if the Hub refuses, fails again and again, or asks to wait for too long.
        OSError: if it can't be reached.
        RuntimeError: if the client fails by itself.
    """
    attempt = 1
    while True:
        try:
            return call()
        except (OSError, RuntimeError, HTTPError) as error:
            cause = cause_of(error)
            wait = _seconds_to_wait(attempt, cause)
            passes = is_passing(cause) or status_of(cause) in also
            if attempt == ATTEMPTS or not passes or wait > LONGEST_WAIT:
                if wait > LONGEST_WAIT:
                    logger.warning(f"The Hub asks to wait for {wait:.0f} s, which is too long; try again then.")
                add_advice(cause)
                if cause is not error:
                    raise cause from error
                raise
            attempt += 1
            logger.warning(f"The Hub: {_first_line(cause)}. Attempt {attempt} of {ATTEMPTS} in {wait:.0f} s.")
            time.sleep(wait)


def _seconds_to_wait(attempt: int, error: BaseException) -> float:
    """Return what the Hub asks for, as seconds or as a date, else 1, 2, 4, ..."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    asked = str(headers.get("Retry-After", ""))
    if asked.isdigit():
        return float(asked)
    try:
        return max(parsedate_to_datetime(asked).timestamp() - time.time(), 0.0)
    except ValueError:
        return 2.0 ** (attempt - 1)


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
