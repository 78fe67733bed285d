"""Other packages to compare with; each runs in its own process."""
