"""The ASGI side: application, server, guard and endpoints."""
