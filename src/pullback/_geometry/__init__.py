"""What a metric makes of a latent space: paths, distances, exponentials, logarithms, transport, curvature."""
