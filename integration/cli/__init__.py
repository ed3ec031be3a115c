"""Command line of VAMP."""
