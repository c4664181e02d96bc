"""The task of images: a large model teaches a small one to classify, to measure or to draw them."""
