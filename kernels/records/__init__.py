"""Loops that find documents below a file's text: JSON objects a line each, lines, paragraphs.

Arrays of bytes in, arrays of bytes and of places out; they know no files. They run without the interpreter's lock.
"""
