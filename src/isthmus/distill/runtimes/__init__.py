"""Converts students for phone runtimes (LiteRT, ExecuTorch and Core ML), and runs the files here."""
