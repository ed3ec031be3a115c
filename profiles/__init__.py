"""Hardware, model and policy settings as TOML, and their loader."""
