"""A compiler from PySpark columns, computed from one row each, to ONNX graphs."""
