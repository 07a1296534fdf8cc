"""Training of the embedded model, stage by stage: vae, teacher, student. train_embedded.py runs them."""
