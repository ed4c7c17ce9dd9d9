"""What every side of Refit shares: specs, manifests, store, jobs, errors, states, SQL."""
