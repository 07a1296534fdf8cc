"""Block-sparse attention: only the key blocks that are estimated to matter."""
