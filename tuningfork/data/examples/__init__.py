"""Rows -> examples: a prompt and its answers, as messages or as text."""
