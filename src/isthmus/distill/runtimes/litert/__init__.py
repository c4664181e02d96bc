"""LiteRT, formerly TensorFlow Lite."""
