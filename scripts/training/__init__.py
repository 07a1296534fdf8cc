"""Train the embedded model, its sparse attention, and an example LoRA."""
