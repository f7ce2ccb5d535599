"""How well models predict whose tables take equally many bytes."""
