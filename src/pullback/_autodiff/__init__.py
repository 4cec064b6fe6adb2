"""Derivatives of maps from the latent space."""
