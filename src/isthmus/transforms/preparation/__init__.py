"""The steps between a model's inputs and its network: declaration, fitting with an engine, compilation to ONNX."""
