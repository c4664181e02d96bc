"""Converts students to ExecuTorch programs and runs those in a child process."""
