"""Self-contained HTML pages: template, charts and a local server."""
