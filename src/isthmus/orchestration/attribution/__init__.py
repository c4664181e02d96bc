"""What each stage between an ideal answer and the one that was given did to the score."""
