"""Linear layers, and the transformer made of them."""
