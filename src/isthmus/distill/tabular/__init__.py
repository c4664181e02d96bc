"""The tabular task: gradient boosting teaches a small network, which is exported as an ONNX graph."""
