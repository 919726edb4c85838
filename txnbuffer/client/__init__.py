"""The application's side."""
