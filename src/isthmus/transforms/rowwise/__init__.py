"""Functions of one row: PySpark columns, compiled to ONNX."""
