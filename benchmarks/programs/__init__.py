"""Whole programs, from sound files to text, each in a process of its own."""
