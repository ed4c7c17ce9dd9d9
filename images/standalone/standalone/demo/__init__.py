"""`refit demo`: the whole line on this machine, watched live, and what changed at the end."""
