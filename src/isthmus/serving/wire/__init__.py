"""Requests, answers, errors and OpenAPI as bytes."""
