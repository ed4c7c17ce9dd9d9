"""What the demos are made of: data and base models, from ordinary packages, kept in the cache folder."""
