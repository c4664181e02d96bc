"""Convert students to ExecuTorch programs, and run these in a child process."""
