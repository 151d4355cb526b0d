"""Calls to the Hub: what an error means, which calls are retried, and who is logged in."""

import re
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import TypeVar

import huggingface_hub
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError
from transformers.utils import logging


logger = logging.get_logger(__name__)

Result = TypeVar("Result")

MAX_ATTEMPTS = 6
MAX_WAIT = 300.0  # seconds; the Hub counts requests over five minutes
# Statuses after which the same request may succeed: time-outs, too many requests, server errors.
TRANSIENT_STATUS_CODES = (408, 429, 500, 502, 503, 504)


def retry(call: Callable[[], Result], also: tuple[int, ...] = ()) -> Result:
    """Call the Hub until it answers: retry after errors of the server or the network, but not after a refusal.

    Args:
        call (`Callable[[], Result]`): The request.
        also (`tuple[int, ...]`): Status codes of refusals that are transient for this request.

    Returns:
        `Result`: what the call returns.

    Raises:
        HfHubHTTPError: if the Hub refuses, fails in every attempt, or asks to wait longer than `MAX_WAIT`.
        OSError: if the Hub can't be reached.
        RuntimeError: if the Hub's client fails without a request.
    """
    attempt = 1
    while True:
        try:
            return call()
        except (OSError, RuntimeError, HTTPError) as error:
            cause = root_cause(error)
            wait = _seconds_to_wait(attempt, cause)
            can_retry = is_transient(cause) or status_code(cause) in also
            if attempt == MAX_ATTEMPTS or not can_retry or wait > MAX_WAIT:
                if wait > MAX_WAIT:
                    logger.warning(f"The Hub asks to wait for {wait:.0f} s, which is too long; try again then.")
                add_advice(cause)
                if cause is not error:
                    raise cause from error
                raise
            attempt += 1
            logger.warning(f"The Hub: {first_line(cause)}. Attempt {attempt} of {MAX_ATTEMPTS} in {wait:.0f} s.")
            time.sleep(wait)


def _seconds_to_wait(attempt: int, error: BaseException) -> float:
    """Return the wait that the Hub asks for, in seconds or by a date, else 1, 2, 4, ... seconds.

    Of its rate limits, `"api";r=0;t=55` says that nothing remains for 55 seconds.
    """
    headers = getattr(getattr(error, "response", None), "headers", {})
    limit = re.search(r"\br=0\b.*\bt=(\d+)", str(headers.get("ratelimit", "")))
    if limit:
        return float(limit[1]) + 1
    requested = str(headers.get("Retry-After", ""))
    if requested.isdigit():
        return float(requested)
    try:
        return max(parsedate_to_datetime(requested).timestamp() - time.time(), 0.0)
    except ValueError:
        return 2.0 ** (attempt - 1)


def root_cause(error: BaseException) -> BaseException:
    """Find the error that the Hub's client has wrapped in one of its own.

    Args:
        error (`BaseException`): What a call raised.

    Returns:
        `BaseException`: the cause, or the error itself.
    """
    is_wrapper = type(error) in (RuntimeError, LocalEntryNotFoundError)
    return error.__cause__ if is_wrapper and error.__cause__ is not None else error


def status_code(error: BaseException) -> int | None:
    """Return the HTTP status of the Hub's answer.

    Args:
        error (`BaseException`): What a call raised.

    Returns:
        `int` or `None`: the status, or `None` if no answer came.
    """
    return getattr(getattr(error, "response", None), "status_code", None)


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later, after a server error or without an answer.

    Args:
        error (`BaseException`): What a call raised.

    Returns:
        `bool`: `False` for a refusal, in offline mode, and for errors of xet, whose client has retried for minutes.
    """
    if isinstance(error, HfHubHTTPError):
        return status_code(error) in TRANSIENT_STATUS_CODES
    return isinstance(error, TimeoutError | HTTPError)  # xet raises ConnectionError


def add_advice(error: BaseException) -> None:
    """Add a note on what to do about a final error.

    Args:
        error (`BaseException`): What a call raised; the note follows its message.
    """
    status = status_code(error)
    if status == 401:
        error.add_note(
            "The Hub does not know the token, if any was given. Log in with `hf auth login`, or set HF_TOKEN."
        )
    elif status == 403:
        error.add_note("The token has no right to write there: give it that right, or check the namespace.")
    elif isinstance(error, ConnectionError):  # only xet raises it
        error.add_note(
            "The Hub's storage of large files (xet) can't be reached; HF_HUB_DISABLE_XET=1 sends them without it."
        )
    elif status is None and is_transient(error):
        error.add_note(f"No answer from {constants.ENDPOINT}. Try again later: what has arrived is not sent again.")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none.

    Args:
        error (`BaseException`): The error.

    Returns:
        `str`: one line.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def known_tokens(token: str | None) -> list[str]:
    """List the tokens in use.

    Args:
        token (`str`, *optional*): One that a caller passed.

    Returns:
        `list[str]`: this one and that of the login, as far as there are any.
    """
    return [each for each in (token, huggingface_hub.get_token()) if each]


def full_repo_id(api: HfApi, repo_id: str) -> str:
    """Add the account's name to a repository name without a namespace.

    Args:
        api (`HfApi`): The Hub's client.
        repo_id (`str`): `"name"` or `"namespace/name"`.

    Returns:
        `str`: `"namespace/name"`.
    """
    return repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"
