"""Servers that arrays are read from and written to: how a URL is opened, what their refusals mean, and how long they
are tried again. Knows no array."""
