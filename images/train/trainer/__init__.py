"""The training stage: DeepSpeed on Hugging Face models."""
