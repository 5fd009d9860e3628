"""pytest plugin: hardware markers (being built)."""
