"""Whole programs, from sound files to text, each in its own process."""
