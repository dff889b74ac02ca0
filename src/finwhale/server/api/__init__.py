"""The HTTP application: its middleware, its paths, health and the page."""
