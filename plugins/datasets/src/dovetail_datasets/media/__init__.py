"""Images: read, kept in files, and prepared for models that take them."""
