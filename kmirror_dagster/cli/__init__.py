"""The `kmirror` command."""
