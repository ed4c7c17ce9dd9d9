"""The evaluation stage: a model is judged in the form it is served in."""
