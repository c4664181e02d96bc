"""Convert students to LiteRT (formerly TensorFlow Lite), and run the files."""
