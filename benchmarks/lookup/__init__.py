"""The lookup of embedding tables: time, memory, shapes, hot rows and the order of ids."""
