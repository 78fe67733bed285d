"""Notebook 09: cache policies of an attention decoder, and the parts of a Whisper."""
