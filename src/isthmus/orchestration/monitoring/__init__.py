"""What labels that become known later say of recorded answers, and how far what is served has drifted."""
