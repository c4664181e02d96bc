"""The task of images: a large model teaches a small one to classify, to measure, to embed or to draw them."""
