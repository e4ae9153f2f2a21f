"""tuningfork: preference training that pays for no token twice and can show its numbers are right."""

__version__ = "0.2.0"
