"""``python -m tilewright``: the command where its script is on no path, and the same interpreter is wanted."""

from tilewright.workflows.cli import main

if __name__ == "__main__":  # worker processes import the main module again
    main(prog_name="tilewright")
