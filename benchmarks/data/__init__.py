"""From raw logs to a data set, and from that to batches."""
