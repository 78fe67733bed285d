"""What notebook 09_encoder_decoder counts, measures and draws beyond its cells."""
