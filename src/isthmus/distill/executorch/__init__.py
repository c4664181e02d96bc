"""ExecuTorch programs: converted, and run in a process of their own."""
