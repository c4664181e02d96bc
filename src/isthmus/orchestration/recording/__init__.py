"""What servers recorded of their answers: collected, and replayed from the history."""
