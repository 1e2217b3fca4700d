"""One rank of a run: from the request to the report."""
