"""Arrays in object stores, against servers that speak S3, through a proxy that delays, cuts and drops answers."""
