"""The columns of a Criteo log, in the order of a line: label, counts I1..I13, categories C1..C26."""

LABEL = "label"
INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
