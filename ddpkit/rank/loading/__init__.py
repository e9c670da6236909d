"""`safe_loader`: this rank's batches, and what becomes of a worker that dies."""
