"""Convert students to Core ML, the runtime of Apple devices."""
