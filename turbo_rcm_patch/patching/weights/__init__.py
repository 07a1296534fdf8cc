"""Weights in 8 bits: converting, storing and loading them, and the files of TurboDiffusion."""
