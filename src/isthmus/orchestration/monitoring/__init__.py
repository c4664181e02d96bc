"""Quality of recorded answers, measured by labels that became known later, and drift of what is served."""
