"""`make bench-suffix`: proposals from what was said before; and text sources by themselves."""
