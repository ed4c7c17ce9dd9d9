"""The board: what serves, what runs, what changed."""
