"""Tables on several processes: measured, planned and modeled."""
