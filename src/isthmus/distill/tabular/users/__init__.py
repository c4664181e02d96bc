"""Teachers of a table that users bring: code, ONNX models, outputs computed elsewhere, and their weighted mean."""
