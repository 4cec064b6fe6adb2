"""Metrics on the latent space, one file each."""
