"""The embedded model's world: captions (grammar), their videos (render), and reading a video (judge)."""
