"""Request transforms: compiled to ONNX graphs, computed by an engine, and checked against the graphs."""
