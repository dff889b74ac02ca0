"""The application: its gate, its paths and what they answer."""
