"""One interface to teachers of any kind: transformers models, torch modules, estimators and functions."""
