"""The ASGI application, its server, the guard, and the endpoints."""
