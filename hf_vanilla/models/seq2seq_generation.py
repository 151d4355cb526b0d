"""What an encoder-decoder adds to transformers' `generate()`."""

# transformers' maximum for every model that does not say: not a choice of anybody for this one.
UNIVERSAL_MAX_LENGTH = 20
