"""Serving: the gateway, the rollout controller, the recorder and feedback."""
