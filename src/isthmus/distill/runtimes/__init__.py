"""What runtimes without the operators of ONNX have in common."""
