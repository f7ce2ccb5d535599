"""How well models with tables of equal bytes predict."""
