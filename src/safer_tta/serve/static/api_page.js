// A file of its own, because the page's policy forbids scripts inside the page.
SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#page",
  deepLinking: true,
  displayRequestDuration: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  tryItOutEnabled: true,
  persistAuthorization: false, // a token stays in this page and is not stored
  validatorUrl: null, // no other site is asked
});
