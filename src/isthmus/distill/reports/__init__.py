"""Render a run from its `report.json` as an HTML page, a model card and a boundary card."""
