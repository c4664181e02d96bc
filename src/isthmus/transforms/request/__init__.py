"""Request transforms by the engine, compiled and checked."""
