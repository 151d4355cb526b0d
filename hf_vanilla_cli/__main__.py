"""`python -m hf_vanilla_cli` is `hf-vanilla`."""

import sys

from . import main


if __name__ == "__main__":
    sys.exit(main())
