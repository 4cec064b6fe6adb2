"""What `pullback.plot` is made of."""
