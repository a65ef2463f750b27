"""What the commands of ``tilewright`` share: options that several of them have, and what a shell completes; and the
command that watches a cluster (`watching.py`), the only one here that runs anything."""
