"""The embedded model's world: captions (grammar), their videos (render), and what a video shows (judge)."""
