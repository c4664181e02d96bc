"""LiteRT, once called TensorFlow Lite."""
