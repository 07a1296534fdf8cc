"""Other tools' checkpoints in diffusers' terms: names.py, lora.py (what a LoRA file holds), files.py (which files are
meant), recognise.py (how they were distilled)."""
