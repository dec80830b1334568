"""What a run said: in words, as a table, as JSON."""
