"""Linear layers, and the transformer built from them."""
