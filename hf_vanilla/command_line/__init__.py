"""What the scripts share: options, checks before long work, reports."""
