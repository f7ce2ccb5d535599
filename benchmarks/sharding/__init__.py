"""Tables on several processes: measured, planned and modelled."""
