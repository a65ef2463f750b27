"""Commands that look at the documents of a corpus with all of their texts: duplicates and quality signals."""
