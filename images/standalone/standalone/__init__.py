"""Everything in one box: the embedded stack and the refit command."""
