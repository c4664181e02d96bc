"""Build, quantize, run and measure ONNX graphs."""
