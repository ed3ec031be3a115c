"""VAMP inside vLLM: plugin, engine hooks, command line and trace replay."""
