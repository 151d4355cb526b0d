"""The names of a model's cache: transformers calls it `cache` from version 5.24 on, and `past_key_values` before."""

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast


# What `generate()`, mask functions and outputs of the transformers at hand call it.
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"


def takes_both_cache_names(forward: Callable) -> Callable:
    """Let a `forward` that has `past_key_values` take `cache` in its place, as newer `generate()` passes it.

    Args:
        forward (`Callable`): The method.

    Returns:
        `Callable`: the method that takes both.

    Raises:
        ValueError: by that method, if both are given.
    """

    @wraps(forward)
    def with_either_name(*args: Any, cache: Any = None, **kwargs: Any) -> Any:
        if cache is None:
            return forward(*args, **kwargs)
        if kwargs.pop("past_key_values", None) is not None:
            raise ValueError("`cache` and `past_key_values` are two names of one argument: give one of them.")
        return forward(*args, past_key_values=cache, **kwargs)

    return with_either_name
