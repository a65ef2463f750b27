"""What the commands of ``tilewright`` share: options that several of them have, and what a shell completes. Nothing
here runs anything."""
