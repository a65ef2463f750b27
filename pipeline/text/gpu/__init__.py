"""How text comes to a GPU, and what is counted there: blocks through lanes, and pieces as one text."""
