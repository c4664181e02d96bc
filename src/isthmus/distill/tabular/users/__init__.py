"""Teachers that users bring: code, pretrained and ONNX models, outputs computed elsewhere, and their weighted mean."""
