"""The data stage: what the model eats."""
