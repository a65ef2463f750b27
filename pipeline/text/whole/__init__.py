"""Documents that are looked at with all of their texts, each on one worker from its beginning to its end."""
