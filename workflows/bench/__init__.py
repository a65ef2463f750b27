"""What this installation reaches, measured beside what others reach, in the same run."""
