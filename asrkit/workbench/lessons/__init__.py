"""What each notebook measures and draws beyond its cells, under the notebook's name."""
