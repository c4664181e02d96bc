"""Runtimes for phones: LiteRT, ExecuTorch and Core ML."""
