"""`/docs`: Swagger UI from an installed package, with nothing fetched from elsewhere."""

from starlette.responses import HTMLResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from swagger_ui_bundle import swagger_ui_path

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Isthmus API</title>
<link rel="stylesheet" href="docs/assets/swagger-ui.css">
<link rel="icon" type="image/png" href="docs/assets/favicon-32x32.png">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/assets/swagger-ui-bundle.js"></script>
<script>
SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui", validatorUrl: null, deepLinking: true});
</script>
</body>
</html>
"""


async def _page(_request: object) -> HTMLResponse:
    return HTMLResponse(_PAGE)


def routes() -> list[BaseRoute]:
    """The page and what it loads."""
    return [Route("/docs", _page), Mount("/docs/assets", StaticFiles(directory=swagger_ui_path))]
