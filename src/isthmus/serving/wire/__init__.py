"""Bytes in and out: requests, answers, errors and OpenAPI."""
