"""The transport: address, connection, pipeline, refusals and the embedded server."""
