"""Which errors of the Hub pass by themselves."""

from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled


# Status codes after which the same request may succeed: time-outs, too many requests, trouble of the server.
PASSING = (408, 429, 500, 502, 503, 504)


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
        `bool`: `False` for a refusal, and where the network is switched off.
    """
    if isinstance(error, HfHubHTTPError):
        return status_of(error) in PASSING
    return isinstance(error, ConnectionError | TimeoutError | HTTPError) and not isinstance(
        error, OfflineModeIsEnabled
    )
