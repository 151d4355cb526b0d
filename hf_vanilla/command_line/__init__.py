"""Shared by the scripts: options, checks before long work, reports."""
