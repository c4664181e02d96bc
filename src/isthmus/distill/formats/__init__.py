"""The runtimes beside ONNX Runtime: what converts a student for each, and what runs the files."""
