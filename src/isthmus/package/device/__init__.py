"""Packages on a device: golden cases, latency and memory, found by a script that needs only NumPy and ONNX Runtime."""
