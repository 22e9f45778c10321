"""The API page: Swagger UI, whose files come with the package fastapi-swagger and are served from here."""

from importlib import resources

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

from .limits import Refused

SWAGGER = ("fastapi_swagger", "resources")
FILES = {
    "swagger-ui-bundle.js": (SWAGGER, "text/javascript"),
    "swagger-ui.css": (SWAGGER, "text/css"),
    "favicon-32x32.png": (SWAGGER, "image/png"),
    "api_page.js": (("safer_tta.serve", "static"), "text/javascript"),
}
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>safer-tta: the API</title>
<link rel="icon" href="/docs/favicon-32x32.png">
<link rel="stylesheet" href="/docs/swagger-ui.css">
</head>
<body>
<div id="page"></div>
<noscript>This page needs JavaScript. The API is also described in <a href="/openapi.json">/openapi.json</a>.</noscript>
<script src="/docs/swagger-ui-bundle.js"></script>
<script src="/docs/api_page.js"></script>
</body>
</html>
"""


def add_api_page(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(PAGE)

    @app.get("/docs/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in FILES:  # a list, not a path: no other file can be asked for
            raise Refused(404, "there is no such file; the API page is at /docs")
        (package, folder), kind = FILES[name]
        return Response((resources.files(package) / folder / name).read_bytes(), media_type=kind)
