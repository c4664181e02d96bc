"""Model runtimes in which packages are verified: ONNX Runtime, Node and the phone runtimes."""
