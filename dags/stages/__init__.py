"""The stages of a retraining run: one file each, one task group each."""
