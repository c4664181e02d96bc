"""ONNX graphs: built, quantized, run, and what they cost."""
